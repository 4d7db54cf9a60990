"""Families of templates that no family has."""

import json
from dataclasses import replace
from typing import Any

from mlx_server.events import Event, TextDelta, ToolCallDelta, ToolCallStarted
from mlx_server.families import family_of
from mlx_server.families.base import ModelFamily
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.sandbox.chat_template import ChatTemplate
from tests.families.goldens import tools

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
