"""Calls between tags: Qwen3-Coder, Seed-OSS, MiniMax-M2, DSML."""

from typing import Any

import pytest

from mlx_server.events import Event, ToolCallDelta, ToolCallFinished
from mlx_server.messages import Tool
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.source import Source
from mlx_server.tool_parsers.tag_formats import QWEN3_CODER
from tests.tool_parsers.tagged import (
    TOOLS,
    Parse,
    only,
    parse_dsml,
    parse_minimax_m2,
    parse_qwen3_coder,
    parse_seed_oss,
)


def qwen(*parameters: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
    return f"\n<function=write>\n{inside}</function>\n</tool_call>"


def seed(*parameters: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in parameters)
    return f"\n<function=write>\n{inside}</function>\n</seed:tool_call>"


def minimax(*parameters: tuple[str, str]) -> str:
    inside = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in parameters)
    return f'\n<invoke name="write">\n{inside}</invoke>\n</minimax:tool_call>'


def deepseek(*parameters: tuple[str, str]) -> str:
    inside = "".join(
        f'<｜DSML｜parameter name="{k}" string="true">{v}</｜DSML｜parameter>\n'
        for k, v in parameters
    )
    return f'\n<｜DSML｜invoke name="write">\n{inside}</｜DSML｜invoke>\n</｜DSML｜function_calls>'


WRITERS = {
    "qwen3_coder": (parse_qwen3_coder, qwen),
    "seed_oss": (parse_seed_oss, seed),
    "minimax_m2": (parse_minimax_m2, minimax),
    "dsml": (parse_dsml, deepseek),
}
every_notation = pytest.mark.parametrize(("parse", "write"), WRITERS.values(), ids=list(WRITERS))


@every_notation
@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "  two  spaces  ",
        "\n\nlines\n\n",
        '"quoted" \\n \\ é 🌦️ <b>&amp;</b>',
        "a </parameter> b </function> c </invoke> d",
        "</tool_call> <tool_call> </minimax:tool_call>",
        "</parameter>\n</tool_calls>",
        "ends with </parameter>",
        "</｜DSML｜parameter> and </｜DSML｜invoke>.",
        "12",
        "null",
    ],
)
def test_a_string_is_what_was_written(parse: Parse, write: Any, text: str) -> None:
    found = only(parse(write(("path", "p"), ("content", text)), TOOLS))
    assert found == {"path": "p", "content": text}


@every_notation
def test_a_call_in_a_value_is_text(parse: Parse, write: Any) -> None:
    example = "So:" + write(("path", "x"), ("count", "1")) + "\nand so on."
    assert only(parse(write(("content", example)), TOOLS)) == {"content": example}


@every_notation
def test_other_values_are_read_by_the_schema(parse: Parse, write: Any) -> None:
    found = only(parse(write(("count", "5"), ("label", "5"), ("other", "x")), TOOLS))
    assert found == {"count": 5, "label": "5", "other": "x"}


@every_notation
@pytest.mark.parametrize("key", ["path", "count", "other"])
def test_of_a_key_that_is_given_twice_the_last_value_counts(
    parse: Parse, write: Any, key: str
) -> None:
    assert str(only(parse(write((key, "1"), (key, "2")), TOOLS))[key]) == "2"


@every_notation
def test_a_call_without_its_end_is_none(parse: Parse, write: Any) -> None:
    whole = write(("path", "p"))
    for size in range(whole.index("</") + len("</parameter")):
        with pytest.raises(ValueError):  # noqa: PT011, as the other parsers of this kind
            parse(whole[:size], TOOLS)


def test_a_string_comes_as_it_is_written() -> None:
    text = qwen(("content", "a" * 500 + "\n</param " + "b" * 500))
    events: list[Event] = []
    calls = ToolCallEmitter(0, TOOLS, events.append)
    source = Source()
    steps = QWEN3_CODER.read(source, calls)
    for number, letter in enumerate(text, start=1):
        source.feed(letter)
        next(steps, None)
        reported = sum(len(e.arguments) for e in events if isinstance(e, ToolCallDelta))
        read = text[:number].count("a") + text[:number].count("b")
        if 100 < number < 1000:
            assert reported > read - 20, (
                f"nothing but a tag that has begun is held: {text[:number]!r}"
            )
    assert isinstance(events[-1], ToolCallFinished)


def test_line_breaks_that_a_strict_schema_may_ask_for_are_the_values() -> None:
    schema = {"properties": {"path": {"type": "string", "minLength": 4}}, "required": ["path"]}
    text = '\n<invoke name="write">\n<parameter name="path">\nab\n</parameter>\n</invoke>\n'
    for strict, path in ((True, "\nab\n"), (False, "ab")):
        tools = [Tool("write", None, schema, strict=strict)]
        (call,) = parse_minimax_m2(text + "</minimax:tool_call>", tools)
        assert call["arguments"] == {"path": path}
