"""The answer formats that a client may request, and tools' arguments, as rules of a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import patterns, user_grammar
from mlx_server.grammars.arguments import object_of
from mlx_server.grammars.check import ReadableSchema, readable
from mlx_server.grammars.compiled import compiled
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.grammars.view import Schema
from mlx_server.messages import Tool
from mlx_server.requests import ChoiceFormat, Format, GrammarFormat, JsonFormat, RegexFormat


def check_schema(schema: Any, *, strict: bool, param: str | None = None) -> None:
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
        check_schema(object_of(tool.parameters), strict=tool.strict, param=param)
    except InvalidGrammar:
        if tool.strict:
            raise
        return _loosened(tool)
    return tool


def _loosened(tool: Tool) -> Tool:
    try:
        found = readable(tool.parameters)
        check_schema(object_of(found.schema), strict=False)
    except InvalidGrammar:
        found = ReadableSchema({"type": "object"}, ["parameters"])
    return replace(tool, parameters=found.schema, unenforced=(*tool.unenforced, *found.lost))


def schema_unenforced(schema: Schema) -> tuple[str, ...]:
    """`keyword at #/path` for each keyword that the schema's grammar leaves out."""
    return compiled(schema).unenforced


def arguments(parameters: Mapping[str, Any], lark: Lark, *, strict: bool = False) -> str:
    """Returns the rule of a tool's arguments: a JSON object, even if the schema does not say so."""
    schema = object_of(parameters)
    check_schema(schema, strict=strict)
    return lark.schema(compiled(schema).grammar)


def format_rule(format: Format, lark: Lark) -> str:
    """Returns the rule of an answer in this format, with nothing before or after it."""
    match format:
        case JsonFormat(schema=found):
            return lark.schema(compiled(found).grammar)
        case RegexFormat(pattern):
            return lark.terminal(patterns.terminal_of(patterns.unanchored(pattern)))
        case ChoiceFormat(options):
            return lark.terminal(" | ".join(map(quoted, dict.fromkeys(options))))
        case GrammarFormat(source):
            return lark.rule(user_grammar.user_grammar_body(source))


def is_verbatim(format: Format | None) -> bool:
    """Whether white space at the beginning of an answer may belong to the format."""
    return format is not None and not isinstance(format, JsonFormat)


def check(format: Format, param: str) -> None:
    """Raises InvalidGrammar if the format can't be used."""
    try:
        match format:
            case JsonFormat(schema=found, strict=strict):
                check_schema(found, strict=strict)
            case RegexFormat(pattern):
                _check_pattern(pattern)
            case ChoiceFormat(options):
                _check_options(options)
            case GrammarFormat(source):
                _check_text(source)
                user_grammar.user_grammar_body(source)
    except InvalidGrammar as error:
        error.param = param
        raise


def unenforced(format: Format) -> tuple[str, ...]:
    """`keyword at #/path` for each keyword that the grammar leaves out."""
    if isinstance(format, JsonFormat) and not format.strict:
        return schema_unenforced(format.schema)
    return ()


def _check_pattern(pattern: str) -> None:
    _check_text(pattern)
    if why := patterns.unsupported(pattern):
        raise InvalidGrammar(f"The pattern has {why}, which a grammar can't express. Leave it out.")
    if why := patterns.excessive_part(pattern):
        raise InvalidGrammar(f"The pattern {why}. Use a shorter one.")


def _check_options(options: tuple[str, ...]) -> None:
    if not options or "" in options:
        raise InvalidGrammar(
            "The choice has no options, or an empty one. Give every option some text."
        )
    if len(options) > limits.CHOICES:
        raise InvalidGrammar(
            f"The choice has {len(options)} options, more than {limits.CHOICES}. Send fewer."
        )
    text = "".join(options)
    _check_text(text)
    if len(text) > limits.CHOICE_CHARACTERS:
        raise InvalidGrammar(
            f"The options have {len(text)} characters, more than {limits.CHOICE_CHARACTERS}. "
            "Send fewer, or shorter ones."
        )


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidGrammar(
            "A pattern or an option has half of a surrogate pair. Send the whole character."
        ) from None
