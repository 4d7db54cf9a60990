"""Families of templates that no family has."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mlx_server.events import Event, TextDelta, ToolCallDelta, ToolCallStarted
from mlx_server.families import family_of
from mlx_server.families.base import ModelFamily
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.system.sandbox.chat_template import ChatTemplate
from tests.families.goldens import tools

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
