"""The answer formats that a client may request, and tools' arguments, as rules of a grammar."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import patterns
from mlx_server.grammars.arguments import framed, object_of
from mlx_server.grammars.check import ReadableSchema, readable
from mlx_server.grammars.compiled import compiled
from mlx_server.grammars.compiled import lark_of as converted
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.grammars.view import Schema
from mlx_server.messages import Tool
from mlx_server.requests import ChoiceFormat, Format, GrammarFormat, JsonFormat, RegexFormat

_HEAD = re.compile(r"^[^\S\n]*([a-zA-Z0-9_-]+)[ \t]*::=", re.MULTILINE)
_LINE_BREAK = re.compile(r"\n\s*(?P<head>(?=[a-zA-Z0-9_-]+[ \t]*::=))?")
"""A line break with the white space after it; the group tells whether a rule begins there."""
_GBNF_PIECE = re.compile(
    r'#[^\n]*|(?P<text>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|(?P<any>\.)'
    r"|(?P<special>!?<[^<>\s]+>)|(?P<start>(?<![\w-])start(?![\w-]))|(?P<open>[\"\[].*)",
    re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ONE = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(source: str) -> bool:
    return _HEAD.search(source) is not None


def lark_of(source: str) -> str:
    """Returns the grammar in Lark. Raises InvalidGrammar."""
    twice = [name for name, times in Counter(_HEAD.findall(source)).items() if times > 1]
    if twice:  # llguidance would use the last definition
        raise _gbnf_refused(f"{twice[0]} is defined twice")
    plain = _GBNF_PIECE.sub(_plain, source)
    return converted(_LINE_BREAK.sub(lambda match: " " if match["head"] is None else "\n", plain))


def _plain(piece: re.Match[str]) -> str:
    """Rewrites a piece with the escapes that llguidance converts correctly, and drops comments."""
    if piece["special"]:
        raise _gbnf_refused(f"{piece[0]} is a special token; those are the model's own")
    if piece["open"]:
        raise _gbnf_refused(f"a {piece[0][0]} is never closed")
    if piece["start"]:  # the converter renames `root` to it
        return "start-rule"
    if piece["any"]:
        return "[\\x00-\U0010ffff]"
    if not piece["text"]:
        return ""
    text = piece["text"]
    opening = "[^" if text.startswith("[^") else text[0]
    inner = _CHARACTER.sub(lambda match: _spelled(match, opening), text[len(opening) : -1])
    return f"{opening}{inner}{text[-1]}"


def _spelled(match: re.Match[str], opening: str) -> str:
    if match[0] == "-" and opening != '"':
        return "-"
    code = match[1] or match[2] or match[3]
    number = int(code, 16) if code else ord(match[5] or _ONE.get(match[4], match[4]))
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise _gbnf_refused(f"{match[0]} is not a character")
    character = chr(number)
    is_plain = number > 0x7F or character.isalnum()
    return character if is_plain else f"\\x{number:02x}"


def _gbnf_refused(why: str) -> InvalidGrammar:
    return InvalidGrammar(f"The grammar can't be used: {why}.")


_TOKEN = re.compile(
    r"(?P<blank>[ \t]+|(?:#|//)[^\n]*)|(?P<line>(?:\r?\n)+)"
    r'|(?P<text>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1f\x7f])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)"
    r"|(?P<special><[^<>\s]+>)|(?P<grammar>@[a-zA-Z0-9_-]+)|(?P<directive>%[a-z]+)"
    r"|(?P<name>[!?_]{0,2}[a-zA-Z][a-zA-Z0-9_-]*)|(?P<open>[(\[{])|(?P<close>[)\]}])"
    r"|(?P<other>[:|~&=,.*+?!^_0-9>-])"
)
_PAIRS = {")": "(", "]": "[", "}": "{"}
_OPTIONS = {"max_tokens", "stop", "temperature", "stop_capture", "capture"}


class _LarkToken(NamedTuple):
    kind: str
    text: str
    line: int


@lru_cache(maxsize=limits.COMPILED_SCHEMAS)
# Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
# GBNF: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
def user_grammar_body(source: str) -> str:
    """Returns the body of a rule for a client's grammar in Lark or GBNF."""
    if len(source) > limits.GRAMMAR_CHARACTERS:
        raise InvalidGrammar(
            f"The grammar has {len(source)} characters, more than "
            f"{limits.GRAMMAR_CHARACTERS}. Send a shorter one."
        )
    lark = lark_of(source) if is_gbnf(source) else source
    tokens = list(_tokens(lark))
    _refuse_excess(tokens)
    return f"%lark {{\n{''.join(_checked_tokens(tokens))}\n}}"


def _tokens(source: str) -> Iterator[_LarkToken]:
    at, line = 0, 1
    while at < len(source):
        match = _TOKEN.match(source, at)
        if not match or not match.lastgroup:
            raise _refused(line, f"{source[at : at + 20]!r} is not Lark")
        kind, text = match.lastgroup, match[0]
        if text in ("%json", "%regex", "%llguidance"):
            _, end = _value_at(source, match.end(), line)
            kind, text = text, source[match.end() : end]
        yield _LarkToken(kind, text, line)
        at = end if kind.startswith("%") else match.end()
        line += source.count("\n", match.start(), at)


def _value_at(source: str, at: int, line: int) -> tuple[Any, int]:
    begun = re.compile(r"\s*").match(source, at)
    assert begun
    try:
        value, end = json.JSONDecoder().raw_decode(source, begun.end())
    except (ValueError, RecursionError):
        raise _refused(line, "a % directive is not followed by JSON") from None
    return value, end


def _refuse_excess(tokens: list[_LarkToken]) -> None:
    opened: list[str] = []
    for token in tokens:
        if token.kind == "open":
            opened.append(token.text)
        elif token.kind == "close" and (not opened or opened.pop() != _PAIRS[token.text]):
            raise _refused(token.line, f"{token.text} closes nothing")
        if len(opened) > limits.GRAMMAR_DEPTH:
            raise _refused(token.line, f"brackets are nested deeper than {limits.GRAMMAR_DEPTH}")
    if opened:
        raise InvalidGrammar(f"The grammar can't be used: {opened[-1]} is never closed.")
    if sum(token.text == "&" for token in tokens) > limits.GRAMMAR_INTERSECTIONS:
        raise InvalidGrammar(
            f"The grammar has more than {limits.GRAMMAR_INTERSECTIONS} intersections (&). "
            "Use fewer."
        )
    rules = sum(token.text == ":" for token in tokens)
    if rules > limits.GRAMMAR_RULES:
        raise InvalidGrammar(
            f"The grammar has {rules} rules, more than {limits.GRAMMAR_RULES}. Use fewer."
        )


def _checked_tokens(tokens: list[_LarkToken]) -> Iterator[str]:
    significant = [token for token in tokens if token.kind not in ("blank", "line")]
    following = dict(zip(map(id, significant), significant[1:], strict=False))
    for token in tokens:
        after = following.get(id(token))
        if token.kind == "name" and token.text in _OPTIONS and after and after.text == "=":
            raise _refused(token.line, f"the option {token.text} can't be used here")
        yield _token_text(token)


def _token_text(token: _LarkToken) -> str:
    kind, text, line = token
    match kind:
        case "special":
            raise _refused(line, f"{text} is a special token; those are the model's own")
        case "grammar":
            raise _refused(line, f"{text} refers to another grammar, and there is none")
        case "directive" if text not in ("%import", "%ignore"):
            raise _refused(line, f"{text} can't be used here")
        case "%llguidance" if json.loads(text):
            raise _refused(line, "%llguidance can't change options here; leave it out")
        case "%llguidance" | "blank":
            return " "
        case "%json":
            return _schema(json.loads(text))
        case "%regex":
            return f"%regex {json.dumps(json.loads(text))}"
        case "regex":
            if why := patterns.unsupported(text):
                raise _refused(
                    line, f"the pattern {text[:40]} has {why}, which can't be expressed here"
                )
            if why := patterns.excessive_part(text):
                raise _refused(line, f"the pattern {text[:40]} {why}")
    return text


def _schema(schema: Any) -> str:
    json_schema = compiled(schema)
    json_schema.require_all()
    return f"%json {json_schema.grammar}"


def _refused(line: int, why: str) -> InvalidGrammar:
    return InvalidGrammar(f"The grammar can't be used: line {line}: {why}.")


def check_schema(schema: Any, *, strict: bool, param: str | None = None) -> None:
    """Raises InvalidGrammar if the schema can't be used or, if strict, not enforced entirely."""
    try:
        json_schema = compiled(schema)
        if strict:
            json_schema.require_all()
    except InvalidGrammar as error:
        error.param = param
        raise


def usable_tools(tools: Sequence[Tool], param: str = "tools") -> tuple[Tool, ...]:
    """Returns the tools with schemas that a grammar can be made of. What can't be read of the
    schema of a tool that is not strict is left out of it, and reported. Raises InvalidGrammar."""
    if len(tools) > limits.TOOLS:
        raise InvalidGrammar(
            f"There are {len(tools)} tools, more than {limits.TOOLS}. Send fewer.", param=param
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
        schema = readable(tool.parameters)
        check_schema(object_of(schema.schema), strict=False)
    except InvalidGrammar:
        schema = ReadableSchema({"type": "object"}, ["parameters"])
    return replace(tool, parameters=schema.schema, unenforced=(*tool.unenforced, *schema.lost))


def schema_unenforced(schema: Schema) -> tuple[str, ...]:
    """`keyword at #/path` for each keyword that the schema's grammar leaves out."""
    return compiled(schema).unenforced


def arguments(parameters: Mapping[str, Any], lark: Lark, *, strict: bool = False) -> str:
    """Returns the rule of a tool's arguments: a JSON object, even if the schema does not say so."""
    schema = object_of(parameters)
    check_schema(schema, strict=strict)
    return lark.schema(compiled(schema).grammar)


def call_json(
    parameters: Mapping[str, Any], lark: Lark, frame: Mapping[str, Any], key: str, *, strict: bool
) -> str:
    """Returns the rule of a call as one JSON object, `frame`, whose member `key` has the arguments.
    The rule may stand beside one of formatted JSON, as an expression of a call's beginning may not:
    the first lexeme would decide."""
    schema = object_of(parameters)
    check_schema(schema, strict=strict)
    return lark.schema(compiled(framed(frame, key, schema)).grammar)


def format_rule(format: Format, lark: Lark) -> str:
    """Returns the rule of an answer in this format, with nothing before or after it."""
    match format:
        case JsonFormat(schema=schema):
            return lark.schema(compiled(schema).grammar)
        case RegexFormat(pattern):
            return lark.terminal(patterns.terminal_of(patterns.unanchored(pattern)))
        case ChoiceFormat(options):
            return lark.terminal(" | ".join(map(quoted, dict.fromkeys(options))))
        case GrammarFormat(source):
            return lark.rule(user_grammar_body(source))


def is_verbatim(format: Format | None) -> bool:
    """Whether white space at the beginning of an answer may belong to the format."""
    return format is not None and not isinstance(format, JsonFormat)


def check(format: Format, param: str) -> None:
    """Raises InvalidGrammar if the format can't be used."""
    try:
        match format:
            case JsonFormat(schema=schema, strict=strict):
                check_schema(schema, strict=strict)
            case RegexFormat(pattern):
                _check_pattern(pattern)
            case ChoiceFormat(options):
                _check_options(options)
            case GrammarFormat(source):
                _check_text(source)
                user_grammar_body(source)
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
