"""Checks the JSON schemas of a request and makes rules of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.schemas.compiled import compiled
from mlx_server.schemas.members import object_of
from mlx_server.schemas.view import Schema


def check(schema: Any, *, strict: bool, param: str | None = None) -> None:
    """Raises InvalidGrammar if the schema can't be used or, if strict, not enforced entirely."""
    try:
        found = compiled(schema)
        if strict:
            found.require_all()
    except InvalidGrammar as error:
        error.param = param
        raise


def check_tools(tools: Sequence[Tool], param: str = "tools") -> None:
    if len(tools) > limits.TOOLS.value:
        raise InvalidGrammar(
            f"There are {len(tools)} tools, more than {limits.TOOLS.value}. Send fewer.",
            param=param,
        )
    size = sum(len(json.dumps(dict(tool.parameters))) for tool in tools)
    if size > limits.TOOL_SCHEMA_BYTES.value:
        raise InvalidGrammar(
            f"The tools' parameters have {size} bytes, more than {limits.TOOL_SCHEMA_BYTES.value}."
            " Send fewer tools, or shorten descriptions.",
            param=param,
        )
    for at, tool in enumerate(tools):
        check(
            object_of(tool.parameters),
            strict=tool.strict,
            param=f"{param}[{at}].function.parameters",
        )


def unenforced(schema: Schema) -> tuple[str, ...]:
    """`keyword at #/path` for each keyword that the schema's grammar leaves out."""
    return compiled(schema).unenforced


def arguments(parameters: Mapping[str, Any], lark: Lark, *, strict: bool = False) -> str:
    """Returns the rule of a tool's arguments: a JSON object, even if the schema does not say so."""
    schema = object_of(parameters)
    check(schema, strict=strict)
    return lark.rule(compiled(schema).grammar)
