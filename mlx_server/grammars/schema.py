"""Checks the JSON schemas of a request and makes rules of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.schemas.compiled import compiled
from mlx_server.schemas.members import object_of
from mlx_server.schemas.readable import ReadableSchema, readable
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


def usable_tools(tools: Sequence[Tool], param: str = "tools") -> tuple[Tool, ...]:
    """Returns the tools with schemas that a grammar can be made of. What can't be read of the
    schema of a tool that is not strict is left out of it, and reported. Raises InvalidGrammar."""
    if len(tools) > limits.TOOLS:
        raise InvalidGrammar(
            f"There are {len(tools)} tools, more than {limits.TOOLS}. Send fewer.",
            param=param,
        )
    size = sum(len(json.dumps(dict(tool.parameters))) for tool in tools)
    if size > limits.TOOL_SCHEMA_BYTES:
        raise InvalidGrammar(
            f"The tools' parameters have {size} bytes, more than {limits.TOOL_SCHEMA_BYTES}."
            " Send fewer tools, or shorten descriptions.",
            param=param,
        )
    return tuple(
        _usable(tool, f"{param}[{at}].function.parameters") for at, tool in enumerate(tools)
    )


def _usable(tool: Tool, param: str) -> Tool:
    try:
        check(object_of(tool.parameters), strict=tool.strict, param=param)
    except InvalidGrammar:
        if tool.strict:
            raise
        return _loosened(tool)
    return tool


def _loosened(tool: Tool) -> Tool:
    try:
        found = readable(tool.parameters)
        check(object_of(found.schema), strict=False)
    except InvalidGrammar:
        found = ReadableSchema({"type": "object"}, ["parameters"])
    return replace(tool, parameters=found.schema, unenforced=(*tool.unenforced, *found.lost))


def unenforced(schema: Schema) -> tuple[str, ...]:
    """`keyword at #/path` for each keyword that the schema's grammar leaves out."""
    return compiled(schema).unenforced


def arguments(parameters: Mapping[str, Any], lark: Lark, *, strict: bool = False) -> str:
    """Returns the rule of a tool's arguments: a JSON object, even if the schema does not say so."""
    schema = object_of(parameters)
    check(schema, strict=strict)
    return lark.schema(compiled(schema).grammar)
