"""Makes the grammar rule of a value that is written as JSON."""

from collections.abc import Mapping

from mlx_server.grammars.lark import Lark
from mlx_server.schemas.values import ValueSchema
from mlx_server.schemas.view import DEFINITIONS

NEVER = r"/[^\s\S]/"

NUMBER = r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,2})?"
"""Matches numbers that are finite in 64 bits. The digits are limited, or a small model would write
them for ever."""


def json_rule(value: ValueSchema, lark: Lark, *types: str) -> str:
    """Returns the rule of the value. types: those of its types that are allowed; all if none are
    given."""
    if {"number"} == set(types or value.types) and value.is_any("number"):
        return lark.terminal(f"/{NUMBER}/")
    wanted = value.types & set(types or value.types)
    options = [option for option in value.options if option.types & wanted]
    if wanted < value.types and options != [value]:
        # next to a type, some keywords of the options can't be enforced
        rules = (json_rule(option, lark, *(option.types & wanted)) for option in options)
        return lark.rule(" | ".join(rules) or NEVER)
    root = value.root.root
    assert isinstance(root, Mapping)
    definitions = {key: root[key] for key in DEFINITIONS if key in root}
    own = {"type": sorted(wanted)} if wanted < value.types else {}
    return lark.json({**definitions, **value.schema, **own})
