"""The rule of a value in a call allows what its schema does, in each syntax that a format has."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_server import limits
from mlx_server.families import family_named
from mlx_server.grammars.arguments import ValueSchema
from mlx_server.grammars.lark import Lark
from mlx_server.grammars.view import View
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import CallFormat, UncallableTool, block_rule
from mlx_server.tool_parsers.value_rules import json_rule
from tests.families.goldens import tokenizer_of
from tests.families.walks import accepts

TABLES = yaml.load(Path(__file__).with_name("values.yaml").read_text("utf-8"), yaml.CSafeLoader)


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


@pytest.mark.parametrize(("schema", "types", "right", "wrong"), TABLES["json"])
def test_it_allows_these_values(
    schema: dict[str, Any], types: list[str], right: list[str], wrong: list[str]
) -> None:
    lark = Lark()
    grammar = lark.source(json_rule(ValueSchema(schema, View(schema)), lark, *types)).source
    assert [text for text in (*right, *wrong) if accepts("plain", grammar, text)] == right


@pytest.mark.parametrize(("schema", "right", "wrong"), TABLES["bare"])
def test_bare_values_follow_their_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    texts = [qwen(value) for value in right + wrong]
    expected = [True] * len(right) + [False] * len(wrong)
    assert allowed("qwen3_coder", {"x": schema}, *texts) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("format", "right", "wrong"), TABLES["formats"])
def test_bare_text_has_its_format(format: str, right: list[str], wrong: list[str]) -> None:
    said = {"x": {"type": "string", "format": format}}
    expected = [True] * len(right) + [False] * len(wrong)
    assert allowed("qwen3_coder", said, *map(qwen, right + wrong)) == expected
    assert allowed("lfm2", said, *map(pythonic, right + wrong)) == expected  # as JSON has it


@pytest.mark.parametrize("links", [2, 3])
def test_beyond_so_many_schemas_a_text_may_be_any(
    links: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TEXT_SCHEMA_DEPTH", 5)
    definitions: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(links)
    }
    definitions[f"d{links}"] = {"type": "string", "minLength": 3}
    parameters = {"x": {"$ref": "#/$defs/d0"}}
    tool = Tool(
        "f",
        "",
        {"type": "object", "properties": parameters, "required": ["x"], "$defs": definitions},
    )
    notation, opens = opening("qwen3_coder")
    grammar = grammar_of("qwen3_coder", notation, opens, (tool,))
    texts = [opens + qwen(text) for text in ("abc", "ab")]
    assert [accepts("qwen3_coder", grammar, text) for text in texts] == [True, links > 2]


@pytest.mark.parametrize(("schema", "right", "wrong"), TABLES["python"])
def test_python_follows_a_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    texts = [f"[f(x={value})]<|tool_call_end|>" for value in right + wrong]
    expected = [True] * len(right) + [False] * len(wrong)
    assert allowed("lfm2", {"x": schema}, *texts) == expected


@pytest.mark.parametrize(("parameters", "text", "right"), TABLES["gemma"])
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
