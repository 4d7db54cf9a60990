"""A slip in a call is read alike in every family, and reported."""

import json
from functools import cache

import pytest

from mlx_server import read
from mlx_server.events import Repaired, RepairKind, TextDelta, ToolCallDelta, Violation
from mlx_server.families import FAMILIES
from mlx_server.families.base import ModelFamily
from mlx_server.families.markup import MarkupFamily
from mlx_server.messages import Message, Tool, ToolCall
from mlx_server.sources.transcript import write_answer
from tests.families.goldens import tokenizer_of

FIND = Tool(
    "find",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CALLING = [each for each in FAMILIES if each.has_calls]
every_family = pytest.mark.parametrize("family", CALLING, ids=lambda family: family.name)


@cache
def written(family: ModelFamily, **arguments: object) -> str:
    call = ToolCall("call_1", "find", json.dumps(arguments))
    answer = Message("assistant", tool_calls=(call,))
    return write_answer(family, tokenizer_of(family.name), answer)


def found_in(family: ModelFamily, output: str) -> tuple[str, object, set[RepairKind]]:
    """Returns the text, the arguments of the one call, and what was repaired."""
    events = read(output, family.name, [FIND])
    assert not [each for each in events if isinstance(each, Violation)]
    text = "".join(each.separated for each in events if isinstance(each, TextDelta))
    arguments = "".join(each.arguments for each in events if isinstance(each, ToolCallDelta))
    repaired = {each.what for each in events if isinstance(each, Repaired)}
    return text, json.loads(arguments or "null"), repaired


@pytest.mark.slow
@every_family
def test_of_an_argument_that_is_given_twice_the_last_value_counts(family: ModelFamily) -> None:
    output = written(family, city="Oslo", days=2, citz="Bern").replace("citz", "city")
    assert found_in(family, output) == ("", {"city": "Bern", "days": 2}, {"json"})


@pytest.mark.slow
@every_family
def test_the_name_of_an_argument_may_have_spaces_around_it(family: ModelFamily) -> None:
    output = written(family, city="Oslo", days=2).replace("days", " days ")
    text, arguments, _ = found_in(family, output)
    assert (text, arguments) == ("", {"city": "Oslo", "days": 2})


@pytest.mark.slow
@every_family
def test_a_call_needs_no_properties(family: ModelFamily) -> None:
    tool = Tool("find", parameters={})
    for arguments in (dict[str, object](), dict[str, object](city="Oslo")):
        events = read(written(family, **arguments), family.name, [tool])
        found = "".join(each.arguments for each in events if isinstance(each, ToolCallDelta))
        assert json.loads(found) == arguments


DELIMITED = [family for family in CALLING if isinstance(family, MarkupFamily)]


@pytest.mark.slow
@pytest.mark.parametrize("family", DELIMITED, ids=lambda family: family.name)
@pytest.mark.parametrize("around", ["Write `{}` in the text.", "- `{}`: finds a city"])
def test_a_call_in_inline_code_is_text(family: ModelFamily, around: str) -> None:
    output = around.format(written(family, city="Oslo", days=2))
    assert found_in(family, output) == (output, None, set())
