"""A call format that no family has is learned from its template."""

import jsonschema
import pytest

from mlx_server.families.by_template import LEARNED
from mlx_server.families.json_families import PLAIN
from mlx_server.messages import Tool
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers.parse_context import OutputSpec
from tests.families.by_template import (
    CALLS,
    NEW,
    ODD,
    calls_in,
    family_with,
    read,
    text_in,
    turn,
    written,
)
from tests.families.goldens import tools
from tests.families.walks import Way

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
