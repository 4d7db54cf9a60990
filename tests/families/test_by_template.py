"""Models of unknown types: their families are found by what their templates write."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mlx_server.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from mlx_server.families import FAMILIES, family_named, family_of
from mlx_server.families.base import ModelFamily
from mlx_server.families.by_template import LEARNED, read_back, samples_of
from mlx_server.families.json_families import PLAIN
from mlx_server.messages import Tool
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers.parse_context import OutputSpec, ParseContext
from mlx_server.system.sandbox.chat_template import ChatTemplate
from tests.families.goldens import tools
from tests.families.prompts import checkpoint_of, template_of
from tests.families.walks import Way

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


def read(family: ModelFamily, said: str, size: int) -> list[Event]:
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
    assert calls_in(read(family, said, 3)) == CALLS


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
    events = read(family, "<|muse|>Hm.<|/muse|>Yes.", 3)
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
        events = read(family, said, size)
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
    assert not calls_in(read(family, '<call to="toolq">{"keyq": "a"}</call>', 3))
    assert isinstance(tools()[0], Tool)
