"""Families that delimit calls within text, each with a way to read what their grammars allow."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher

from mlx_server.events import Event, TextDelta, ToolCallDelta, ToolCallFinished, ToolCallStarted
from mlx_server.families import FAMILIES, family_named
from mlx_server.families.base import ModelFamily
from mlx_server.families.markup import MarkupFamily
from mlx_server.grammars.formats import is_verbatim
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import OutputSpec
from mlx_server.requests import ToolChoice
from tests.contract.pairs import KINDS
from tests.families.goldens import Golden, tools
from tests.families.walks import Way

MARKUP = [family for family in FAMILIES if isinstance(family, MarkupFamily)]
WITH_CALLS = [family for family in MARKUP if family.layout_with(tools()).call_formats]
WAYS = [
    Way(family, control)
    for family in WITH_CALLS
    for control in (True, False)
    # what text spells is read by the same code in all families of a kind; every vocabulary of Kimi
    # K3 has its marks, and JSON among its arguments could spell them
    if control or (family.name in KINDS and family.name != "kimi_k3")
]


def called(way: Way) -> str:
    return f"{way.family.name}-{'tokens' if way.control else 'text'}"


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def calls_of(events: Sequence[Event]) -> list[tuple[str, Any]]:
    """All of them finished."""
    names = {e.call: e.name for e in events if isinstance(e, ToolCallStarted)}
    finished = {e.call for e in events if isinstance(e, ToolCallFinished)}
    assert finished == names.keys(), f"calls that were not finished: {events}"
    texts = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, ToolCallDelta):
            texts[event.call] += event.arguments
    return [(name, json.loads(texts[call])) for call, name in names.items()]


def assert_valid(calls: Sequence[tuple[str, Any]], offered: Sequence[Tool]) -> None:
    schemas = {tool.name: json.dumps(tool.parameters) for tool in offered}
    for name, arguments in calls:
        assert name in schemas
        _validator(schemas[name]).validate(arguments)


@lru_cache
def _validator(schema: str) -> Validator:
    """`jsonschema.validate` would check the schema itself each time."""
    found = json.loads(schema)
    made = validator_for(found)
    made.check_schema(found)
    return made(found)


def walked(
    way: Way, wanted: OutputSpec, seeds: int, begun: str = ""
) -> list[tuple[str, list[Event]]]:
    matcher = way.matcher(wanted)
    said = [way.walk(matcher.deep_copy(), seed, begun) for seed in range(seeds)]
    reading = replace(
        wanted.context, formatted=wanted.format is not None, verbatim=is_verbatim(wanted.format)
    )
    return [(way.spelled(one), way.read(reading, one)) for one in said]


# What models write


def refused(
    family: ModelFamily, case: Golden, choice: ToolChoice = "auto", *, control: bool
) -> str:
    """What the family's grammar says of it: nothing, if all is well."""
    way = Way(family, control)
    matcher = _matcher(family.name, control, case.prompt_end, choice).deep_copy()
    said = way.encode(case.output)
    taken = matcher.validate_tokens(said)
    if taken < len(said):
        return f"not {way.spelled(said[: taken + 1])[-40:]!r}"
    matcher.consume_tokens(said)
    return "" if matcher.is_accepting() or case.cut else "not the end"


@lru_cache(maxsize=8)
def _matcher(family: str, control: bool, prompt_end: str, choice: ToolChoice) -> LLMatcher:
    """The same for many cases, which come one after the other."""
    way = Way(family_named(family), control)
    return way.matcher(OutputSpec(way.reading(tools(), prompt_end), choice, thinks=True))


every_way = pytest.mark.parametrize("way", WAYS, ids=called)
in_tokens = pytest.mark.parametrize("way", [way for way in WAYS if way.control], ids=called)
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "born": {"type": "integer"}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
