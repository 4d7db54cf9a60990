"""Models of unknown types: their families are found by what their templates write."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlx_server.checkpoints.checkpoint import Checkpoint
from mlx_server.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from mlx_server.families import FAMILIES, family_named, family_of
from mlx_server.families.base import ModelFamily
from mlx_server.families.by_template import LEARNED, read_back, samples_of
from mlx_server.families.plain import PLAIN
from mlx_server.messages import Tool
from mlx_server.parsers.output_spec import OutputSpec
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.templates.chat_template import ChatTemplate
from tests.families import byte_level, checkpoint
from tests.families.goldens import tools
from tests.families.probe import probed
from tests.families.prompts import checkpoint_of, template_of
from tests.families.walks import Way

pytestmark = pytest.mark.tables

ONE, ALL = "{%- for c in m.tool_calls %}{%- set f = c.function %}", "{%- endfor %}"
ARGUMENTS = "{{ f.arguments | tojson }}"
PAIRS = "{%- for k, v in f.arguments | items %}"
VALUE = "{{ v if v is string else v | tojson }}"
COMMA = "{{ '' if loop.last else ', ' }}"


def written(calls: str, before: str = "") -> str:
    """A template of turns, in which `calls` renders those of one."""
    return (
        "{%- for m in messages %}<|{{ m.role }}|>\n" + before + "{{ m.content or '' }}"
        "{%- if m.tool_calls %}" + calls + "{%- endif %}<|end|>\n{%- endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>\n{%- endif %}{#- tools -#}"
        "{%- if false %}{{ tools }}{%- endif %}"
    )


NEW = {
    "names in a tag": ONE + '<call to="{{ f.name }}">' + ARGUMENTS + "</call>" + ALL,
    "names in a block of tags": (
        "<calls>\n"
        + ONE
        + '<call name="{{ f.name }}">'
        + ARGUMENTS
        + "</call>\n"
        + ALL
        + "</calls>"
    ),
    "names between control tokens": ONE
    + "<|fn|>{{ f.name }}<|with|>"
    + ARGUMENTS
    + "<|/fn|>"
    + ALL,
    "a name and a line": ONE + "<|run|>{{ f.name }}\n" + ARGUMENTS + "<|/run|>" + ALL,
    "objects with another key": (
        ONE + '<do>{"name": "{{ f.name }}", "parameters": ' + ARGUMENTS + "}</do>\n" + ALL
    ),
    "an array": (
        "[ACTS]["
        + ONE
        + '{"name": "{{ f.name }}", "arguments": '
        + ARGUMENTS
        + "}"
        + COMMA
        + ALL
        + "][/ACTS]"
    ),
    "a name as the key": (
        "<|acts|>[" + ONE + '{"{{ f.name }}": ' + ARGUMENTS + "}" + COMMA + ALL + "]<|/acts|>"
    ),
    "Python": (
        "<py>["
        + ONE
        + "{{ f.name }}("
        + PAIRS
        + "{{ k }}={{ v | tojson }}"
        + COMMA
        + ALL
        + ")"
        + COMMA
        + ALL
        + "]</py>"
    ),
    "Python, a block for each call": (
        ONE
        + "<py>{{ f.name }}("
        + PAIRS
        + "{{ k }}={{ v | tojson }}"
        + COMMA
        + ALL
        + ")</py>\n"
        + ALL
    ),
    "tags": (
        ONE
        + "<use>\n<fn={{ f.name }}>\n"
        + PAIRS
        + "<p={{ k }}>"
        + VALUE
        + "</p>\n"
        + ALL
        + "</fn>\n</use>\n"
        + ALL
    ),
    "tags with quotes in one block": (
        "<uses>\n"
        + ONE
        + '<fn name="{{ f.name }}">\n'
        + PAIRS
        + '<p name="{{ k }}">'
        + VALUE
        + "</p>\n"
        + ALL
        + "</fn>\n"
        + ALL
        + "</uses>"
    ),
    "keys and values": (
        ONE
        + "<|c|>{{ f.name }}\n"
        + PAIRS
        + "<|k|>{{ k }}<|v|>"
        + VALUE
        + "<|e|>\n"
        + ALL
        + "<|/c|>\n"
        + ALL
    ),
    "keys and values in marks of their own": (
        "<cs>"
        + ONE
        + "<c>{{ f.name }}<sep>"
        + PAIRS
        + "<k>{{ k }}</k><v>"
        + VALUE
        + "</v>"
        + ALL
        + "</c>"
        + ALL
        + "</cs>"
    ),
}

CODER = (
    ONE
    + "\n<tool_call>\n<function={{ f.name }}>\n"
    + PAIRS
    + "<parameter={{ k }}>\n"
    + VALUE
    + "\n</parameter>\n"
    + ALL
    + "</function>\n</tool_call>"
    + ALL
)
GLM = (
    ONE
    + "<tool_call>{{ f.name }}\n"
    + PAIRS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + VALUE
    + "</arg_value>\n"
    + ALL
    + "</tool_call>\n"
    + ALL
)
FUNCTOOLS = (
    "functools["
    + ONE
    + '{"name": "{{ f.name }}", "arguments": '
    + ARGUMENTS
    + "}"
    + COMMA
    + ALL
    + "]"
)
HERMES = (
    ONE
    + '<tool_call>\n{"name": "{{ f.name }}", "arguments": '
    + ARGUMENTS
    + "}\n</tool_call>"
    + ALL
)

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Zürich", "unit": "c"}),
    ("write_file", {"path": "a b.md", "content": "if a < b:\n\n  {x} [y] 'z'\n"}),
    ("add", {"a": 1, "b": 2}),
]


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("unknown"), byte_level(), "{{ messages }}")


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
    return events + parser.finish("", cut=False)


def calls_in(events: list[Event]) -> list[tuple[str, dict[str, Any]]]:
    names = [event.name for event in events if isinstance(event, ToolCallStarted)]
    texts = [""] * len(names)
    for event in events:
        if isinstance(event, ToolCallDelta):
            texts[event.call] += event.arguments
    return list(zip(names, map(json.loads, texts), strict=True))


def text_in(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


new = pytest.mark.parametrize("calls", NEW.values(), ids=NEW)


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


@pytest.mark.parametrize(
    ("calls", "model_type", "name"),
    [
        (CODER, "step3p5", "qwen3_5"),
        (CODER, "unheard_of", "qwen3_coder"),
        (CODER, "mimo_v2_flash", "qwen3_coder"),
        (CODER, "afmoe", "qwen3_coder"),
        (HERMES, "afmoe", "plain"),
        (HERMES, "bailing_moe", "plain"),
        (HERMES, "exaone_moe", "exaone4"),
        (CODER, "qwen3_vl", "qwen3_coder"),
        (GLM, "bailing_hybrid", "glm4_5"),
        (GLM, "laguna", "glm4_5"),
        (FUNCTOOLS, "llama", "phi4"),
        (HERMES, "unheard_of", "plain"),
        (HERMES, "gemma3", "hermes"),
        (GLM, "qwen3", "glm4_5"),
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


def test_a_template_without_calls_proves_nothing(unknown: Checkpoint) -> None:
    assert family_with(unknown, written("")) is PLAIN
    assert family_with(unknown, written(""), "qwen3").name == "qwen3"


def test_a_notation_that_cannot_be_understood_changes_nothing(unknown: Checkpoint) -> None:
    odd = written(ONE + "{{ f.name | reverse }} {{ f.arguments | tojson }} " + ALL)
    assert family_with(unknown, odd) is PLAIN
    assert family_with(unknown, odd, "qwen3").name == "qwen3"


def test_an_id_is_no_part_of_the_marks(unknown: Checkpoint) -> None:
    numbered = ONE + '<call id="{{ c.id }}" to="{{ f.name }}">' + ARGUMENTS + "</call>" + ALL
    assert family_with(unknown, written(numbered)) is PLAIN


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


def test_a_tool_that_nobody_offered_is_text(unknown: Checkpoint) -> None:
    for calls in NEW.values():
        template = written(calls)
        family = family_with(unknown, template)
        said = turn(template, [("fly", {"to": "Mars"})])
        events = read(family, said, 4)
        assert not calls_in(events)
        assert text_in(events).strip() == said.strip()


def test_a_probe_says_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(written(NEW["names in a tag"], THOUGHTS), "utf-8")
    said = probed(path)
    assert f"family: {LEARNED}" in said
    assert said.count("read back") == 2
    assert "<|muse|>" in said
    assert "NOT read back" in probed(path, "hermes")


def test_offered_tools_are_those_of_the_request(unknown: Checkpoint) -> None:
    """And not those that the template was probed with."""
    family = family_with(unknown, written(NEW["names in a tag"]))
    assert not calls_in(read(family, '<call to="toolq">{"keyq": "a"}</call>', 3))
    assert isinstance(tools()[0], Tool)


NO_MODELS_OUTPUT = {
    "kimi_k3": "<|close|>tools",
    "muse": "toolq",
}
"""What is left of a turn's text besides its calls, because the rest of it is the prompt's, or
stops the answer."""

SINGLE = {"glm4"}
"""Families whose answers end with a call, so that a turn of two is two answers."""

TEMPLATES = [family.name for family in FAMILIES if template_of(family.name).is_file()]
WITHOUT_CALLS = {"smollm3", "gemma3", "granite", "phi4", "lfm2", "plain"}
"""Families whose templates here write no calls of their own."""
WRITES_CALLS = [name for name in TEMPLATES if name not in WITHOUT_CALLS]


@pytest.mark.parametrize("name", sorted(WITHOUT_CALLS))
def test_templates_that_write_no_calls_show_none(name: str) -> None:
    assert not samples_of(checkpoint_of(name)).calls


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


@pytest.mark.parametrize("name", WRITES_CALLS)
def test_a_checkpoint_with_its_template_is_of_the_family(name: str) -> None:
    model_type = (*family_named(name).model_types, "unheard_of")[0]
    assert family_of(replace(checkpoint_of(name), model_type=model_type)).name == name
