"""What each call format in tags has of its own."""

import pytest

from tests.tool_parsers.tagged import (
    TOOLS,
    Parse,
    only,
    parse_dsml,
    parse_minimax_m2,
    parse_qwen3_coder,
    parse_seed_oss,
)


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
