"""Delimiters in the spellings of keyboards."""

from dataclasses import dataclass

from mlx_server.tool_parsers.call_format import respelled, respelled_delimiter


def test_a_delimiter_of_ordinary_characters_has_no_other_spelling() -> None:
    assert respelled_delimiter("<tool_call>") == ()


def test_each_other_spelling_comes_once() -> None:
    found = respelled_delimiter("<｜tool▁calls｜>")
    assert "<|tool_calls|>" in found
    assert "<｜tool calls｜>" in found
    assert r"<|tool\_calls|>" in found
    assert "<｜tool▁calls｜>" not in found
    assert len(found) == len(set(found)) == 7


def test_a_record_is_spelled_one_way_throughout() -> None:
    @dataclass(frozen=True)
    class Record:
        opens: str
        ends: tuple[str, ...]
        count: int

    found = list(respelled(Record("<｜a▁b｜>", ("▁", "c"), 3)))
    assert len(found) == 7
    assert Record("<|a_b|>", ("_", "c"), 3) in found
    assert Record("<｜a b｜>", (" ", "c"), 3) in found
    assert list(respelled(Record("<a_b>", ("c",), 3))) == []
