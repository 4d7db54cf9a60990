"""The rule of a value in a call allows what its schema does, in each syntax that a format has."""

import json
from typing import Any

import pytest

from mlx_server.families import family_named
from mlx_server.grammars import grammar
from mlx_server.grammars.arguments import ValueSchema
from mlx_server.grammars.lark import Lark
from mlx_server.grammars.view import View
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import CallFormat, UncallableTool, block_rule
from mlx_server.tool_parsers.value_rules import FORMATS, json_rule
from tests.families.goldens import tokenizer_of
from tests.walks import accepts

LONG = 41 * "9"
WORD = {"$defs": {"word": {"enum": ["a", "b"]}}, "$ref": "#/$defs/word"}
EITHER = {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}, {"type": "null"}]}


def grammar_of(family: str, notation: CallFormat, opens: str, tools: tuple[Tool, ...]) -> str:
    lark = Lark(tokenizer_of(family).control_tokens)
    (block,) = notation.blocks
    return lark.source(f"{lark.text(opens)} {block_rule(block, lark, tools, several=True)}").source


def opening(family: str) -> tuple[CallFormat, str]:
    """The first format of a family that has a grammar, and its opening delimiter."""
    formats = family_named(family).layout_with().call_formats
    return next((each, opens) for each in formats if each.blocks for opens in each.opens)


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
    ("schema", "types", "right", "wrong"),
    [
        (
            {"type": "number"},
            (),
            ["0", "-0.5", "1e99", LONG, "1E-9"],
            ["01", f"{LONG}9", ".5", "1e"],
        ),
        ({"type": "number", "minimum": 3}, (), ["3", "4.5"], ["2", "-1"]),
        ({"type": "integer"}, (), ["5", "-1"], ["1.5", "a"]),
        ({}, ("number",), ["1.5"], ['"a"', "null"]),
        ({}, ("string", "null"), ['"a"', "null"], ["1", "[]"]),
        (EITHER, (), ['"ab"', "7", "null"], ['"abc"', "1.5", "[]"]),
        (EITHER, ("string",), ['"ab"'], ['"abc"', "7", "null"]),
        (EITHER, ("integer", "null"), ["7", "null"], ['"a"']),
        (WORD, (), ['"a"'], ['"c"']),
        (WORD, ("string",), ['"a"'], ['"c"', "1"]),
        ({"enum": [1, "a"]}, ("string",), ['"a"'], ["1"]),
        ({"const": "</x>\n"}, (), [json.dumps("</x>\n")], ['"x"']),
    ],
)
def test_it_allows_these_values(
    schema: dict[str, Any], types: tuple[str, ...], right: list[str], wrong: list[str]
) -> None:
    lark = Lark()
    grammar = lark.source(json_rule(ValueSchema(schema, View(schema)), lark, *types)).source
    assert [text for text in (*right, *wrong) if accepts("plain", grammar, text)] == right


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


@pytest.mark.slow
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
    assert FORMATS.keys() == grammar.FORMATS


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
        ("kimi_k3", Tool("a<|sep|>b", "", {})),
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
