"""Grammars of a block of calls, as a family's format writes it."""

from typing import Any

from mlx_server.families import family_named
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import CallFormat, block_rule
from tests.families.goldens import tokenizer_of
from tests.walks import accepts

WORD = {"type": "string", "enum": ["α", 'b"', "c'"]}
TREE = {
    "type": "object",
    "properties": {
        "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        "leaf": {"type": "integer"},
    },
    "required": ["leaf"],
}
PARAMETERS: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer", "minimum": 3},
    "size": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"type": ["string", "null"]},
    "choice": {"enum": ["</parameter>", "a\"b'c\n", "<|im_end|>", 1, None, ""]},
    "pattern": {"type": "string", "pattern": r"^[a-z/]{2,4}\d$"},
    "short": {"type": "string", "minLength": 2, "maxLength": 5},
    "union": {
        "anyOf": [
            {"type": "string", "maxLength": 3},
            {"type": "integer"},
            {"type": "array", "items": {"type": "integer"}},
        ]
    },
    "inner": {
        "type": "object",
        "properties": {"word": {"$ref": "#/$defs/word"}, "on": {"type": ["null", "boolean"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "list": {
        "type": "array",
        "items": {"$ref": "#/$defs/word"},
        "minItems": 1,
        "maxItems": 3,
    },
    "any": {},
    "constant": {"const": "é"},
    "tree": {"$ref": "#/$defs/tree"},
}
TOOLS = (
    Tool(
        "all",
        "",
        {
            "type": "object",
            "properties": PARAMETERS,
            "required": ["text", "count", "inner"],
            "$defs": {"word": WORD, "tree": TREE},
        },
    ),
    Tool("nothing", "", {}),
    Tool("optional", "", {"type": "object", "properties": {"ä": {"type": "string"}, "b c": {}}}),
)
CLOSING = (
    *("\n</parameter>", "</parameter>", "</function>", "</invoke>", "</seed:tool_call>"),
    *("</arg_value>", "</arg_key>", "</tool_call>", "</minimax:tool_call>", '<|"|>', "<escape>"),
    *("<|close|>argument<|sep|>", "<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
    *("</｜DSML｜parameter>", "</｜DSML｜ parameter>", "</｜DSML｜invoke>", "</｜DSML｜ invoke>"),
    *("<tool_call|>", "<end_function_call>", "<|tool_call_end|>", "</function_calls>"),
    *("<|python_end|>", '"', "'", "}", "]", ")", "0", "\n"),
)


def grammar_of(family: str, notation: CallFormat, opens: str, tools: tuple[Tool, ...]) -> str:
    lark = Lark(tokenizer_of(family).control_tokens)
    (block,) = notation.blocks
    return lark.source(f"{lark.text(opens)} {block_rule(block, lark, tools, several=True)}").source


def marked(family: str) -> list[tuple[CallFormat, str]]:
    notations = family_named(family).layout_with().call_formats
    return [(n, opens) for n in notations if n.blocks for opens in n.opens]


def opening(family: str) -> tuple[CallFormat, str]:
    return marked(family)[0]


def allowed(family: str, parameters: dict[str, Any], *texts: str) -> list[bool]:
    tool = Tool("f", "", {"type": "object", "properties": parameters, "required": [*parameters]})
    notation, opens = opening(family)
    grammar = grammar_of(family, notation, opens, (tool,))
    return [accepts(family, grammar, opens + text) for text in texts]


def pythonic(text: str) -> str:
    return f'[f(x="{text}")]<|tool_call_end|>'


def qwen(value: str) -> str:
    return f"<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
