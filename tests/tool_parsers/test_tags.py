"""Calls between tags: Qwen3-Coder, Seed-OSS, MiniMax-M2, DSML."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from mlx_server.events import Event, ToolCallDelta, ToolCallFinished
from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.source import Source
from mlx_server.tool_parsers.tag_formats import DSML_FORMATS, MINIMAX_M2, QWEN3_CODER, SEED_OSS

PROPERTIES = {
    "path": {"type": "string"},
    "content": {"type": "string"},
    "count": {"type": "integer"},
    "label": {"type": ["string", "null"]},
}
TOOLS = [Tool("write", None, {"properties": PROPERTIES}), Tool("now")]

Parse = Callable[..., list[dict[str, Any]]]

parse_qwen3_coder = partial(parse_calls, QWEN3_CODER)
parse_seed_oss = partial(parse_calls, SEED_OSS)
parse_minimax_m2 = partial(parse_calls, MINIMAX_M2)


def parse_dsml(text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Of whichever version; what stands between the delimiters is not always enough to tell."""
    for notation in DSML_FORMATS:
        with suppress(ValueError):
            return parse_calls(notation, text, tools)
    raise ValueError("there is no call")


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


def only(calls: list[dict[str, Any]]) -> Any:
    (call,) = calls
    return call["arguments"]


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
def test_a_key_given_twice_is_malformed(parse: Parse, write: Any, key: str) -> None:
    with pytest.raises(ValueError, match=r"twice|no call"):
        parse(write((key, "1"), (key, "1")), TOOLS)


@every_notation
def test_a_call_without_its_end_is_none(parse: Parse, write: Any) -> None:
    whole = write(("path", "p"))
    for size in range(whole.index("</") + len("</parameter")):
        with pytest.raises(ValueError):  # noqa: PT011, as the other parsers of this kind
            parse(whole[:size], TOOLS)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_minimax_m2, "<invoke name='now'></invoke>"),
        (parse_minimax_m2, "<invoke name=now></invoke>"),
        (parse_minimax_m2, "<invoke name=now/>"),
        (parse_dsml, '<｜DSML｜invoke name="now" /></｜DSML｜function_calls>'),
        (parse_dsml, '<｜DSML｜invoke name="now"></｜DSML｜invoke></｜DSML｜tool_calls>'),
        (parse_dsml, '<｜DSML｜ invoke name="now"></｜DSML｜ invoke>\n</｜DSML｜ calls>'),
        (parse_seed_oss, "<function=now></function>"),
        (parse_qwen3_coder, "\n<function= now >\n\n</function>\n"),
    ],
)
def test_a_call_without_arguments(parse: Parse, text: str) -> None:
    assert only(parse(text, TOOLS)) == {}


def test_dsml_says_which_values_are_json() -> None:
    text = (
        '<｜DSML｜invoke name="write">'
        '<｜DSML｜parameter name="a" string="false">{"x": [1, null]}</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="true">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="c" string="false">"1"</｜DSML｜parameter>'
        '<｜DSML｜parameter name="path" string="false">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="count" string="true">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="d" string="false">{"x": 1, "x": 2}</｜DSML｜parameter>'
        "</｜DSML｜invoke>"
    )
    wanted = {"a": {"x": [1, None]}, "b": "1", "c": "1", "path": "1", "count": 1}
    wanted["d"] = {"x": 2}
    assert only(parse_dsml(text, TOOLS)) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "<function=write>\n<parameter=path>\np\n<parameter=content>\nc\n</function>\n</tool_call>",
        "<function=write>\n<parameter=path>p</parameter><parameter=content>c</parameter></tool_call>",
        "<function=write>\n<parameter=path>p</parameter><parameter=content>c</function>",
    ],
)
def test_forgotten_ends(text: str) -> None:
    assert only(parse_qwen3_coder(text, TOOLS)) == {"path": "p", "content": "c"}


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
