"""Calls that are not written as JSON: what a strict tool's schema says holds, or is refused."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.formats import usable_tools
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import OutputSpec
from tests.families.walks import Way
from tests.parsers.markup.ways import WITH_CALLS, calls_of
from tests.tables import cases

CHECKED = jsonschema.FormatChecker(["uuid", "ipv4", "ipv6"])

TABLE = yaml.safe_load(Path(__file__).with_name("schemas.yaml").read_text("utf-8"))
AB: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "additionalProperties": False,
}
SCHEMAS = {
    name: {
        "type": "object",
        "properties": {"v": schema},
        "required": ["v"],
        "additionalProperties": False,
        "$defs": TABLE["definitions"],
    }
    for name, schema in TABLE["values"].items()
} | {f"arguments: {name}": schema for name, schema in TABLE["arguments"].items()}

REFUSED = {
    "pattern with anchors inside": "#/properties/v/pattern",
    "arguments: two at least": "#/minProperties",
    "arguments: one at most": "#/maxProperties",
    "arguments: one at least of any": "#/minProperties",
    "arguments: only one of them": "#/oneOf",
    "arguments: patternProperties": "#/patternProperties",
    "arguments: properties and patternProperties": "#/patternProperties",
}
"""By name of the keyword, where a notation has no way to say it."""

SAME_SYNTAX = {"qwen3_5", "step3_5", "nemotron3", "muse"}
"""But for the marks around it, their calls are written as qwen3_coder's and dots' are."""

NOTATED = [
    family
    for family in WITH_CALLS
    if family.name not in SAME_SYNTAX
    and any(
        block.unsupported(Tool("f", "", {"minProperties": 1}))
        for notation in family.layout_with().call_formats
        for block in notation.blocks
    )
]


QUOTING = {"llama3", "llama4", "lfm2", "minicpm", "olmo3", "gemma4", "functiongemma"}
"""They may write a text as JSON, which any pattern can be said of."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schema"),
    [
        pytest.param(family, schema, id=f"{family.name}-{schema}")
        for i, family in enumerate(NOTATED)
        for j, schema in enumerate(SCHEMAS)
        if i % 3 == j % 3  # each schema in a third of the families
    ],
)
def test_what_a_strict_tool_says_holds_or_is_refused(family: Any, schema: str) -> None:
    way, parameters = Way(family, True), SCHEMAS[schema]
    tool = Tool("f", "", parameters, strict=True)
    wanted = OutputSpec(way.reading([tool]), "required")
    try:
        usable_tools([tool])
        matcher = way.matcher(wanted)
    except InvalidGrammar as error:
        if REFUSED.get(schema, "nothing") in str(error):
            return
        raise
    valid = jsonschema.Draft202012Validator(parameters, format_checker=CHECKED)
    # two dozen families have few notations: each is walked often, by another seed each time
    said = way.walk(matcher, NOTATED.index(family))
    calls = calls_of(way.read(wanted.context, said))
    assert calls, way.spelled(said)
    for _, arguments in calls:
        assert valid.is_valid(arguments), way.spelled(said)


@cases
def test_what_does_not_hold_is_told(parameters: dict[str, Any], reported: list[str]) -> None:
    for family in NOTATED:
        tool = Tool("f", "", parameters)
        expected = (
            ()
            if family.name in QUOTING and reported[0].startswith("pattern at")
            else tuple(reported)
        )
        assert family.unsupported_keywords(tool) == expected, family.name
