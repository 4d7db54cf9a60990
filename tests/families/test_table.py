"""Which family a checkpoint belongs to; every type that the installed mlx-lm can run has one."""

import importlib.util
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mlx_server.errors import ContextTooLong, SettingsError
from mlx_server.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from mlx_server.families import FAMILIES, family_named, family_of
from mlx_server.families.base import ModelFamily
from mlx_server.families.by_template import LEARNED, read_back, samples_of
from mlx_server.families.harmony import GPT_OSS
from mlx_server.families.json_families import PLAIN, QWEN3, SMOLLM2
from mlx_server.families.literal_families import LLAMA3
from mlx_server.families.markup import MarkupFamily
from mlx_server.families.named_families import MISTRAL
from mlx_server.families.table import markdown
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.parse_context import OutputSpec, ParseContext
from mlx_server.prompts.harmony.vocabulary import encoding
from mlx_server.prompts.template_prompt import RenderedPrompt
from mlx_server.system.sandbox.chat_template import ChatTemplate
from mlx_server.tool_parsers.formats import HERMES
from mlx_server.tool_parsers.formats import MISTRAL as MISTRALS_CALLS
from tests.families.goldens import tools
from tests.families.prompts import checkpoint_of, template_of
from tests.families.walks import Way
from tests.prompts.harmony.gpt_oss import gpt_oss_checkpoint, text_of
from tests.tables import cases


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Checkpoint:
    return read_checkpoint(demo_path)


def test_the_demo_model_is_known_by_type_and_template(demo: Checkpoint) -> None:
    assert family_of(demo) is SMOLLM2


@pytest.mark.parametrize("mark", SMOLLM2.template_markers)
def test_a_template_that_lacks_a_mark_is_of_another_family(demo: Checkpoint, mark: str) -> None:
    assert demo.template
    other = ChatTemplate(demo.template.source.replace(mark, "other"))
    assert family_of(replace(demo, template=other)) is LLAMA3
    assert family_of(replace(demo, template=None)) is LLAMA3


@cases
def test_what_the_template_shows_outweighs_the_type(
    unknown: Checkpoint, model_type: str, template: str, family: str
) -> None:
    found = replace(unknown, model_type=model_type, template=ChatTemplate(template))
    assert family_of(found).name == family


def test_the_readme_has_the_table() -> None:
    """`mlx-server models --families --markdown` prints it."""
    readme = (Path(__file__).parents[2] / "mlx_server/families/README.md").read_text("utf-8")
    found = re.search(r"<!-- families[^>]*-->\n(.*?)<!-- /families -->", readme, re.DOTALL)
    assert found
    assert found[1] == markdown()


def test_an_unknown_type_is_plain_and_said_so(
    unknown: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert family_of(unknown) is PLAIN
    assert "'tiny' belongs to no known family" in caplog.text


def test_the_owner_settles_it(demo: Checkpoint, unknown: Checkpoint) -> None:
    assert family_of(demo, "plain") is PLAIN
    assert family_of(unknown, "smollm2") is SMOLLM2


@pytest.mark.parametrize("name", ["", "Plain", "gpt"])
def test_a_family_that_there_is_not(demo: Checkpoint, name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        family_of(demo, name)
    for family in FAMILIES:
        assert family.name in caught.value.message


MODEL_TYPES = yaml.safe_load(Path(__file__).with_name("model_types.yaml").read_text("utf-8"))
FAMILY_OF = {each: family for family, types in MODEL_TYPES.items() for each in types.split()}
"""Of a template that shows no calls."""


def test_every_type_of_mlx_lm_has_been_thought_of() -> None:
    spec = importlib.util.find_spec("mlx_lm.models")  # which is not imported
    assert spec
    assert spec.submodule_search_locations
    files = Path(spec.submodule_search_locations[0]).glob("*.py")
    has_model = re.compile(r"^(class Model\(|from \.\w+ import Model\b)", re.MULTILINE)
    types = {file.stem for file in files if has_model.search(file.read_text("utf-8"))}
    assert types == FAMILY_OF.keys()


@pytest.mark.parametrize("model_type", sorted(FAMILY_OF))
def test_a_type_has_its_family_and_its_models_stop(unknown: Checkpoint, model_type: str) -> None:
    """At the checkpoint's own end of a turn, whatever the family's stop tokens are."""
    checkpoint = replace(unknown, model_type=model_type, end_tokens=frozenset({7}))
    family = family_of(checkpoint)
    assert family.name == FAMILY_OF[model_type]
    assert 7 in family.stops(checkpoint)


def test_every_family_but_one_has_a_format_for_calls() -> None:
    assert [family.name for family in FAMILIES if not family.has_calls] == ["gemma3"]


# What a record of a family says of itself, and the defaults that most families share.


TOOLS = (Tool("f"),)


TYPES, OTHER = ("other", "tiny"), ("other", "tin")
MARKS, ABSENT = ("{{", "messages"), ("{{", "absent")


@pytest.mark.parametrize(
    ("types", "marks", "evidence"),
    [
        ((), (), 0),
        (TYPES, (), 1),
        ((), MARKS, 2),
        (TYPES, MARKS, 3),
        (OTHER, (), 0),
        ((), ABSENT, 0),
        (TYPES, ABSENT, 0),
        (OTHER, MARKS, 0),
    ],
)
def test_what_is_asked_for_must_be_there_and_then_counts(
    unknown: Checkpoint, types: tuple[str, ...], marks: tuple[str, ...], evidence: int
) -> None:
    family = MarkupFamily("f", model_types=types, template_markers=marks)
    assert family.evidence(unknown) == evidence


def with_template(checkpoint: Checkpoint, template: str) -> Checkpoint:
    return replace(checkpoint, template=ChatTemplate(template))


def test_tools_in_the_prompt_are_called_as_hermes_does_and_as_the_family_does() -> None:
    taught = MISTRAL.with_tools_in_prompt()
    assert taught.tools_in_prompt
    assert taught.layout_with(TOOLS).call_formats == (HERMES, MISTRALS_CALLS)
    assert taught.layout_with().call_formats == (MISTRALS_CALLS,), "without tools it is not taught"
    hermes = QWEN3.with_tools_in_prompt().layout_with(TOOLS).call_formats
    assert hermes.count(HERMES) == 1
    assert hermes[0] == HERMES


@pytest.mark.parametrize(
    ("prefix", "layout", "space"),
    [
        ("\n</think>\n\n", MarkupLayout(), "\n\n"),
        ("</think>", MarkupLayout(), ""),
        ("\n</think>\n\n", MarkupLayout(trims=False), ""),
        ("\n</think>\n\n", MarkupLayout(trims_text=False), ""),
        ("", MarkupLayout(), ""),
    ],
)
def test_the_white_space_after_reasoning_is_that_of_the_prefix_where_it_is_trimmed(
    prefix: str, layout: MarkupLayout, space: str
) -> None:
    assert MarkupFamily("f", layout, answer_prefix=prefix).layout_with().after_reasoning == space


@pytest.mark.parametrize(
    ("template", "thinks"), [("{{ '<think>' }}", True), ("{{ messages }}", False)]
)
def test_a_model_thinks_if_its_template_has_the_tags(
    demo: Checkpoint, template: str, thinks: bool
) -> None:
    checkpoint = with_template(demo, template)
    assert QWEN3.thinks(checkpoint) is thinks
    assert QWEN3.reasons(checkpoint) is thinks
    assert QWEN3.reasoning_pairs(checkpoint) == ((("<think>", "</think>"),) if thinks else ())


def test_a_continued_message_is_in_its_reasoning_or_in_its_text(unknown: Checkpoint) -> None:
    begun = Message("assistant", reasoning="Hm")
    assert QWEN3.open_end(unknown, begun) == "<think>"
    assert QWEN3.open_end(unknown, replace(begun, content="Yes")) == ""
    assert QWEN3.open_end(unknown, Message("assistant")) == ""
    assert GPT_OSS.reasons(unknown)
    assert GPT_OSS.open_end(unknown, begun) == "<|channel|>analysis<|message|>"


def test_a_long_conversation_is_counted_before_a_renderer_of_the_family_gets_it(
    demo: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = RenderedPrompt([1])
    monkeypatch.setattr("mlx_server.prompts.harmony.prompt.render", lambda *_: rendered)
    message = Message("user", "word " * 50)
    for count, most, fits in ((1, 10, False), (1, 49, True), (10, 60, False), (10, None, True)):
        asked = Conversation((message,) * count)
        if fits:
            assert GPT_OSS.render(demo, asked, most) is rendered
            continue
        with pytest.raises(ContextTooLong):
            GPT_OSS.render(demo, asked, most)


# The family of gpt-oss: how it is found, and its golden prompts.


GOLDEN = Path(__file__).parent / "golden" / "gpt_oss"


def read(path: Path) -> Conversation:
    found = json.loads(path.read_text("utf-8"))
    return Conversation(
        messages=tuple(_message(message) for message in found["messages"]),
        tools=tuple(Tool(**tool) for tool in found.get("tools", ())),
        template_kwargs=found["template_kwargs"],
        response_format=found.get("response_format"),
    )


def _message(found: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in found.pop("tool_calls", ()))
    return Message(**found, tool_calls=calls)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return gpt_oss_checkpoint(tmp_path_factory.mktemp("gpt-oss"))


PROMPTS = sorted(path.stem for path in GOLDEN.glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_golden_prompts(gpt_oss: Checkpoint, name: str) -> None:
    path = GOLDEN / f"{name}.json"
    assert text_of(gpt_oss, read(path)) == path.with_suffix(".txt").read_text("utf-8")


def test_the_family_is_found_by_the_models_type(gpt_oss: Checkpoint) -> None:
    assert family_of(gpt_oss) is GPT_OSS
    stops = {encoding().encode(t, allowed_special="all")[0] for t in GPT_OSS.stop_tokens}
    assert GPT_OSS.stops(gpt_oss) == stops == {199_999, 200_002, 200_012}


PARTS = {
    "one": "{%- for c in m.tool_calls %}{%- set f = c.function %}",
    "all": "{%- endfor %}",
    "arguments": "{{ f.arguments | tojson }}",
    "pairs": "{%- for k, v in f.arguments | items %}",
    "value": "{{ v if v is string else v | tojson }}",
    "comma": "{{ '' if loop.last else ', ' }}",
}
GROUPS = yaml.load(Path(__file__).with_name("templates.yaml").read_text("utf-8"), yaml.CSafeLoader)
NEW, KNOWN, EDITED, ODD = (
    {name: re.sub("«(.*?)»", lambda part: PARTS[part[1]], text) for name, text in own.items()}
    for own in GROUPS.values()
)


def written(calls: str, before: str = "") -> str:
    """A template of turns, in which `calls` renders those of one."""
    return (
        "{%- for m in messages %}<|{{ m.role }}|>\n" + before + "{{ m.content or '' }}"
        "{%- if m.tool_calls %}" + calls + "{%- endif %}<|end|>\n{%- endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>\n{%- endif %}{#- tools -#}"
        "{%- if false %}{{ tools }}{%- endif %}"
    )


def family_with(unknown: Checkpoint, template: str, model_type: str = "unheard_of") -> ModelFamily:
    return family_of(replace(unknown, template=ChatTemplate(template), model_type=model_type))


def turn(template: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": made}]
    prompt = ChatTemplate(template).render({"messages": messages, "tools": []})
    return prompt.split("<|assistant|>\n")[1].rstrip().removesuffix("<|end|>")


def read_events(family: ModelFamily, said: str, size: int) -> list[Event]:
    parser = family.make_parser(ParseContext(tools=tools()))
    pieces = (said[at : at + size] for at in range(0, len(said), size))
    events = [event for piece in pieces for event in parser.feed(-1, piece)]
    return events + parser.finish(cut=False)


def calls_in(events: list[Event]) -> list[tuple[str, dict[str, Any]]]:
    names = [event.name for event in events if isinstance(event, ToolCallStarted)]
    texts = [""] * len(names)
    for event in events:
        if isinstance(event, ToolCallDelta):
            texts[event.call] += event.arguments
    return list(zip(names, map(json.loads, texts), strict=True))


def text_in(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Zürich", "unit": "c"}),
    ("write_file", {"path": "a b.md", "content": "if a < b:\n\n  {x} [y] 'z'\n"}),
    ("add", {"a": 1, "b": 2}),
]


@pytest.mark.parametrize(
    ("calls", "model_type", "name"),
    [
        (KNOWN["CODER"], "step3p5", "step3_5"),
        (KNOWN["CODER"], "unheard_of", "qwen3_coder"),
        (KNOWN["CODER"], "mimo_v2_flash", "qwen3_coder"),
        (KNOWN["CODER"], "afmoe", "qwen3_coder"),
        (KNOWN["HERMES"], "afmoe", "plain"),
        (KNOWN["HERMES"], "bailing_moe", "plain"),
        (KNOWN["HERMES"], "exaone_moe", "exaone4"),
        (KNOWN["CODER"], "qwen3_vl", "qwen3_coder"),
        (KNOWN["GLM"], "bailing_hybrid", "glm4_5"),
        (KNOWN["GLM"], "laguna", "glm4_5"),
        (KNOWN["FUNCTOOLS"], "llama", "phi4"),
        (KNOWN["HERMES"], "unheard_of", "plain"),
        (KNOWN["HERMES"], "gemma3", "hermes"),
        (KNOWN["GLM"], "qwen3", "glm4_5"),
    ],
)
def test_a_family_that_has_the_notation_is_taken(
    unknown: Checkpoint, calls: str, model_type: str, name: str
) -> None:
    template = written(calls)
    family = family_with(unknown, template, model_type)
    assert family.name == name
    said = turn(template, CALLS)
    assert calls_in(read_events(family, said, 3)) == CALLS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "before", "model_type", "name"),
    [
        # hand-edited templates with slips in a family's own format
        (EDITED["SPACED"], "", "deepseek_v3", "deepseek_v3"),
        (EDITED["SPACED"], "", "unheard_of", "deepseek_v3"),
        (EDITED["EMPTY_MARKS"], "", "llama4", "llama4"),
        # a family of the same format whose markers this template lacks is no better one
        (EDITED["LINES"], "", "minimax", "hunyuan"),
        (EDITED["LINES"], "", "unheard_of", "hunyuan"),
        # what the template asks for counts more than how it renders earlier calls
        (EDITED["BARE"], "{#- functools[{...}] -#}", "phi3", "phi4"),
        (EDITED["BARE"], "", "qwen2", "llama3"),
        ("", "", "glm4v", "glm4"),
        # marks that the family would leave as text are another format
        (NEW["an array"], "", "llama", LEARNED),
        (NEW["objects with another key"], "", "qwen3", LEARNED),
    ],
)
def test_a_family_that_reads_a_template_keeps_it(
    unknown: Checkpoint, calls: str, before: str, model_type: str, name: str
) -> None:
    family = family_with(unknown, written(calls, before), model_type)
    assert family.name == name


def test_tools_as_python_writes_them_hide_no_calls(unknown: Checkpoint) -> None:
    """As SmolLM3's and Apriel's templates render them."""
    tools = "{%- for t in tools or xml_tools or [] %}{{ t | string }}{%- endfor %}"
    for calls, name in (
        (KNOWN["GLM"], "glm4_5"),
        (NEW["an array"], LEARNED),
        (EDITED["LINES"], "hunyuan"),
    ):
        assert family_with(unknown, tools + written(calls)).name == name
    spoilt = "{{ m.tool_calls }}"
    assert not samples_of(replace(unknown, template=ChatTemplate(written(spoilt)))).calls


@pytest.mark.slow
def test_a_template_that_does_not_end_is_no_obstacle(unknown: Checkpoint) -> None:
    endless = "{%- for a in range(99999) %}{%- for b in range(99999) %}{{ messages }}"
    template = endless + "{%- endfor %}{%- endfor %}"
    assert family_with(unknown, template, "qwen3").name == "qwen3"


THOUGHTS = "{%- if m.reasoning_content %}<|muse|>{{ m.reasoning_content }}<|/muse|>{%- endif %}"


def test_thoughts_are_marked_as_the_template_marks_them(unknown: Checkpoint) -> None:
    template = written(NEW["an array"], THOUGHTS)
    family = family_with(unknown, template)
    assert samples_of(replace(unknown, template=ChatTemplate(template))).thoughts == (
        "<|muse|>",
        "<|/muse|>",
    )
    events = read_events(family, "<|muse|>Hm.<|/muse|>Yes.", 3)
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "Hm."
    assert text_in(events) == "Yes."


NO_MODELS_OUTPUT = {"kimi_k3": "<|close|>tools", "muse": "toolq"}
"""What is left of a turn's text besides its calls, because the rest of it is the prompt's, or
stops the answer."""

SINGLE = {"glm4"}
"""Families whose answers end with a call, so that a turn of two is two answers."""

TEMPLATES = [family.name for family in FAMILIES if template_of(family.name).is_file()]
WITHOUT_CALLS = {"smollm3", "gemma3", "granite", "phi4", "lfm2", "plain"}
"""Families whose templates here write no calls of their own."""
WRITES_CALLS = [name for name in TEMPLATES if name not in WITHOUT_CALLS]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES_CALLS)
def test_a_family_reads_what_its_template_writes(name: str) -> None:
    samples = samples_of(checkpoint_of(name))
    calls = samples.named or samples.calls
    assert calls
    for sample in calls[:1] if name in SINGLE else calls:
        reading = read_back(family_named(name), sample)
        assert reading.is_right, sample.written
        assert not reading.repairs, sample.written
        assert reading.text == NO_MODELS_OUTPUT.get(name, ""), sample.written


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES_CALLS)
def test_a_checkpoint_with_its_template_is_of_the_family(name: str) -> None:
    model_type = (*family_named(name).model_types, "unheard_of")[0]
    assert family_of(replace(checkpoint_of(name), model_type=model_type)).name == name


# A call format that no family has is learned from its template.


new = pytest.mark.parametrize("calls", NEW.values(), ids=NEW)


@pytest.mark.slow
@new
def test_a_notation_that_no_family_has_is_learned(unknown: Checkpoint, calls: str) -> None:
    template = written(calls)
    family = family_with(unknown, template)
    assert family.name == LEARNED
    said = turn(template, CALLS)
    for size in (1, 2, 5, len(said)):
        events = read_events(family, said, size)
        assert calls_in(events) == CALLS, said
        assert not text_in(events).strip(), said


@pytest.mark.slow
@new
def test_it_holds_the_model_to_that_notation(unknown: Checkpoint, calls: str) -> None:
    template = written(calls)
    way = Way(family_with(unknown, template), control=False)
    matcher = way.matcher(OutputSpec(way.reading(tools()), "required"))
    said = way.encode(turn(template, CALLS[:1]).strip())
    assert matcher.validate_tokens(said) == len(said), way.spelled(said)
    schemas = {tool.name: tool.parameters for tool in tools()}
    for seed in range(2):
        spec = OutputSpec(way.reading(tools()), "required")
        events = way.read(way.reading(tools()), way.walk(way.matcher(spec), seed))
        assert calls_in(events)
        for name, arguments in calls_in(events):
            jsonschema.validate(arguments, schemas[name])


def test_a_notation_that_cannot_be_understood_changes_nothing(unknown: Checkpoint) -> None:
    odd = written(ODD["reversed names"])
    assert family_with(unknown, odd) is PLAIN
    assert family_with(unknown, odd, "qwen3").name == "qwen3"


def test_offered_tools_are_those_of_the_request(unknown: Checkpoint) -> None:
    """And not those that the template was probed with."""
    family = family_with(unknown, written(NEW["names in a tag"]))
    assert not calls_in(read_events(family, '<call to="toolq">{"keyq": "a"}</call>', 3))
    assert isinstance(tools()[0], Tool)
