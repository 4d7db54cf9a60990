"""What a grammar of calls allows, the family's parser reads: finished, valid, and nothing else."""

from typing import Any

import jsonschema
import pytest

from mlx_server.events import Event
from mlx_server.families import family_named
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.schemas import report
from mlx_server.tool_parsers.blocks import block_rule
from mlx_server.tool_parsers.call_format import CallFormat, finished_calls
from mlx_server.tool_parsers.format_text import FORMATS
from mlx_server.tool_parsers.parameters import UncallableTool
from tests.families.goldens import tokenizer_of
from tests.walks import accepts, walk

pytestmark = pytest.mark.tables

NOTATED = [
    *("qwen3_coder", "nemotron3", "seed_oss", "minimax_m2", "deepseek_v32", "glm4_5", "kimi_k3"),
    *("gemma4", "functiongemma", "lfm2", "olmo3", "llama4"),
]

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
    return lark.source(f"{lark.text(opens)} {block_rule(block, lark, tools, several=True)}")


def marked(family: str) -> list[tuple[CallFormat, str]]:
    notations = family_named(family).layout_with().call_formats
    return [(n, opens) for n in notations if n.blocks for opens in n.opens]


def read(family: str, ids: list[int], tools: tuple[Tool, ...]) -> list[Event]:
    tokenizer = tokenizer_of(family)
    text = tokenizer.detokenizer()
    control = tokenizer.control_tokens
    parser = family_named(family).make_parser(ParseContext(tools=tools, control=control))
    events = [event for id in ids for event in parser.feed(id, text.feed(id))]
    return events + parser.finish(text.finish(), cut=False)


@pytest.mark.parametrize("family", NOTATED)
def test_what_is_allowed_is_read_as_calls(family: str) -> None:
    for notation, opens in marked(family):
        grammar = grammar_of(family, notation, opens, TOOLS)
        for seed in range(12):
            ids = walk(family, grammar, seed, CLOSING)
            said = f"seed {seed}: {tokenizer_of(family).raw(ids)!r}"
            events = read(family, ids, TOOLS)
            kinds = {type(event).__name__ for event in events}
            kinds -= {"Repaired"} if notation.repairs else set()
            assert kinds <= {"ToolCallStarted", "ToolCallDelta", "ToolCallFinished"}, said
            calls = finished_calls(events)
            assert calls, said
            assert len(calls) == sum(type(e).__name__ == "ToolCallStarted" for e in events), said
            schemas = {tool.name: tool.parameters for tool in TOOLS}
            for call in calls:
                jsonschema.validate(call["arguments"], schemas[call["name"]])


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


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["", "a\nb", "7", "null", "</p>"], ["</parameter>", "</function>"]),
        ({"type": "integer"}, ["7", "-1"], ["7.5", "x", '"7"', ""]),
        ({"type": "boolean"}, ["true", "False"], ["yes", "1"]),
        ({"type": ["string", "null"], "maxLength": 3}, ["abc", "null", "a b"], ["abcd"]),
        ({"enum": ["a", "b c"]}, ["a", "b c"], ["b", '"a"', "A"]),
        ({"enum": [1, None, "x"]}, ["1", "null", "x"], ["2", "xx"]),
        ({"type": ["string", "integer"], "enum": ["1", 2]}, ["2"], ["1"]),
        ({"type": "string", "pattern": "^a+$"}, ["aa"], ["", "ab"]),
        ({"type": "string", "pattern": "b|c$"}, ["abx", "xc"], ["", "xcx"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]"], ["[1.5]", "1, 2"]),
        ({"type": ["string", "object"]}, ['{"a": 1}', "a {"], ["{a}", " {"]),
        ({"type": ["string", "integer"]}, ["7", "7 a", "7.5"], []),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, ["ab"], ["", "a"]),
        ({"type": "string", "anyOf": [{"const": "a"}, {"pattern": "^b"}]}, ["a", "bc"], ["ab", ""]),
        ({"enum": ["a", "bb"], "minLength": 2}, ["bb"], ["a"]),
        ({"type": ["string", "null"], "format": "ipv4"}, ["0.0.0.0", "null"], ["0.0.0", ""]),
    ],
)
def test_bare_values_follow_their_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    texts = [qwen(value) for value in right + wrong]
    expected = [True] * len(right) + [False] * len(wrong)
    assert allowed("qwen3_coder", {"x": schema}, *texts) == expected


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ("date-time", ["2024-02-29T23:59:60Z", "2024-01-31t00:00:00.5+01:00"], ["2024-01-01"]),
        ("time", ["23:59:60Z", "00:00:00.25-05:30"], ["23:59:60", "24:00:00Z", "00:00:00z1"]),
        (
            "date",
            ["2024-01-31", "2024-04-30"],
            ["2024-02-30", "2024-04-31", "2024-13-01", "24-1-1"],
        ),
        ("duration", ["P1Y2M3D", "PT1H", "P2W", "P1DT1M2S"], ["P", "P1Y2D", "PT", "P1H", "P1W1D"]),
        ("email", ["a.b+c@d-e.fg", "a@[10.0.0.1]"], ["a@", "a b@c", "a..b@c", "a@b..c", "@c"]),
        ("hostname", ["a", "a-1.b2"], ["-a", "a-", "a..b", "a_b", "a" * 64]),
        ("ipv4", ["0.0.0.0", "255.199.10.9"], ["256.0.0.0", "1.1.1", "01.1.1.1"]),
        ("ipv6", ["::", "::1", "a::", "1:2:3:4:5:6:7:8", "1::3:4", "1:2::"], ["1", ":1", "1:::2"]),
        ("ipv6", ["1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8"], ["1:2:3:4:5:6:7", "1::2:3:4:5:6:7:8"]),
        ("uuid", ["0123abCD-0123-4567-89ab-0123456789ab"], ["0123abcd01234567 89ab0123456789ab"]),
        ("uri", ["http://a.b:1/c?d=e#f", "urn:a:b", "a:", "a:/b//c", "a://[::1]"], ["//a", "a:%g"]),
    ],
)
def test_bare_text_has_its_format(format: str, right: list[str], wrong: list[str]) -> None:
    said = {"x": {"type": "string", "format": format}}
    expected = [True] * len(right) + [False] * len(wrong)
    assert allowed("qwen3_coder", said, *map(qwen, right + wrong)) == expected
    assert allowed("lfm2", said, *map(pythonic, right + wrong)) == expected  # as JSON has it


def test_all_formats_that_json_holds_are_held_in_text() -> None:
    assert FORMATS.keys() == report.FORMATS


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["'a'", '"a\\"b\\n"', '""', "'\\x41'"], ["a", "'a", "'\\ud800'"]),
        ({"type": ["boolean", "null"]}, ["True", "false", "None", "null"], ["'x'", "1"]),
        ({"enum": ["a b", 1.5, True]}, ["'a b'", '"a b"', "1.5", "True"], ["1", "'a'"]),
        ({"type": "integer", "maximum": 9}, ["7", "-12"], ["10", "7.0"]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, ["[]", "[None]"], ["[1]"]),
        ({"type": "object"}, ["{}", "{'a': [1, {'b': None}]}"], ["[]", "{1}"]),
        ({"type": "object", "properties": {"u": {}}, "required": ["w"]}, ['{"w": 1}'], ["{}"]),
        ({"type": "object", "properties": {"u": False}}, ["{}", '{"w": 1}'], ['{"u": 1}']),
        ({"type": "integer", "enum": [1, "a"]}, ["1"], ["'a'"]),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1, 2]"], ["[]"]),
        ({"type": "string", "minLength": 1.0}, ["'a'"], ["''"]),
        ({"anyOf": [{"enum": ["aa", "b"], "maxLength": 1}, {"const": 1}]}, ['"b"', "1"], ['"aa"']),
        ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ["'aa'", '"ab"']),
        ({"type": "array", "uniqueItems": False, "items": {"const": 1}}, ["[1]"], ["[2]"]),
    ],
)
def test_python_follows_a_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    texts = [f"[f(x={value})]<|tool_call_end|>" for value in right + wrong]
    expected = [True] * len(right) + [False] * len(wrong)
    assert allowed("lfm2", {"x": schema}, *texts) == expected


@pytest.mark.parametrize(
    ("parameters", "text", "right"),
    [
        ({"b": {"type": "null"}, "a": {"type": "boolean"}}, "a:true,b:null", True),
        ({"b": {"type": "null"}, "a": {"type": "boolean"}}, "b:null,a:true", False),
        ({"x y": {"type": "string"}}, 'x y:<|"|>{a:b}<|"|>', True),
        ({"x:": {"type": "string"}}, '<|"|>x:<|"|>:<|"|>a<|"|>', True),
        ({"x": {"type": "string"}}, "x:a", False),
        ({"x": {"enum": ["a"]}}, 'x:<|"|>b<|"|>', False),
        ({"x": {"type": "object"}}, 'x:{a:[1,{b:<|"|>c<|"|>}]}', True),
        ({"x": {"type": "number"}}, "x:1e-05", True),
    ],
)
def test_gemma_follows_a_schema(parameters: dict[str, Any], text: str, right: bool) -> None:
    assert allowed("gemma4", parameters, f"call:f{{{text}}}<tool_call|>") == [right]


@pytest.mark.parametrize(
    ("family", "tool"),
    [
        ("qwen3_coder", Tool("a>b", "", {})),
        ("qwen3_coder", Tool("f", "", {"properties": {"a\nb": {}}, "required": ["a\nb"]})),
        ("minimax_m2", Tool('a"b', "", {})),
        ("glm4_5", Tool("a<b", "", {})),
        ("gemma4", Tool("a b", "", {})),
        ("lfm2", Tool("f", "", {"properties": {"a-b": {}}, "required": ["a-b"]})),
    ],
)
def test_what_has_no_way_to_be_written_is_refused(family: str, tool: Tool) -> None:
    notation, _ = opening(family)
    with pytest.raises(UncallableTool, match="This model has no way to write"):
        notation.blocks[0].call(Lark(), tool)


def test_a_parameter_that_can_be_left_out_is_if_it_can_not_be_written() -> None:
    tool = Tool("f", "", {"properties": {"a-b": {}, "c": {"type": "null"}}})
    notation, opens = opening("lfm2")
    grammar = grammar_of("lfm2", notation, opens, (tool,))
    for text, right in (("f(c=None)", True), ("f()", True), ("f(a-b=1)", False)):
        assert accepts("lfm2", grammar, f"{opens}[{text}]<|tool_call_end|>") is right
