"""Content as text or in parts: what a model that reads only text gets, and what is reported."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from mlx_server.api.chat_completions.input import MessageParam
from mlx_server.api.content import Content, parts_of, thoughts_of
from mlx_server.messages import Media, content_of

CONTENT: TypeAdapter[Any] = TypeAdapter(Content)


def read(given: Any) -> str:
    return content_of(parts_of(CONTENT.validate_python(given), "messages[2].content"))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ("a", "a"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "a\nno"),
        ([{"type": "output_text", "text": "b", "annotations": []}], "b"),
        ([{"type": "text", "text": None}, {"type": "refusal"}], "\n"),
        (["a", {"text": "b"}, None], "a\nb\n"),
        ([{"type": "markdown", "text": "x"}], "x"),
        ([{"type": "tool_result", "content": [{"type": "text", "text": "x"}]}], "x"),
        ([{"type": "tool_use", "id": "a", "name": "f", "input": {}}], ""),
        ([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "a"}], "a"),
        ({"type": "text", "text": "a"}, "a"),
        ({"a": [1, "ü"]}, '{"a": [1, "ü"]}'),
        (5, "5"),
        ([5, [True], {"a": None}, {"type": 5}], '5\n[true]\n{"a": null}\n{"type": 5}'),
        ([{"type": "text", "text": {"a": 1}}, {"type": None, "text": "b"}], '{"a": 1}\nb'),
    ],
)
def test_parts_are_lines_of_one_text(parts: Any, text: str) -> None:
    assert read(parts) == text


@pytest.mark.parametrize(
    ("part", "thought"),
    [
        ({"type": "thinking", "thinking": "x", "signature": "s"}, "x"),
        ({"type": "reasoning", "text": "x"}, "x"),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}, "x"),
        ({"type": "thinking", "thinking": [{"type": "text", "text": "x"}]}, "x"),
    ],
)
def test_thoughts(part: Any, thought: str) -> None:
    assert thoughts_of(CONTENT.validate_python(["a", part])) == [thought]
    for role, ignored in (("assistant", []), ("user", [f"content.{part['type']}"])):
        assert MessageParam(role=role, content=[part]).ignored() == ignored


@pytest.mark.parametrize("kind", ["tool_use", "redacted_thinking", "smell", "executable_code"])
def test_a_part_without_text_is_reported(kind: str) -> None:
    assert MessageParam.model_validate(
        {"role": "assistant", "content": [{"type": kind, "name": "a"}]}
    ).ignored() == [f"content.{kind}"]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("image_url", "[image, not shown: this model reads only text]"),
        ("input_audio", "[audio, not shown: this model reads only text]"),
        ("input_image", "[image, not shown: this model reads only text]"),
        ("computer_screenshot", "[image, not shown: this model reads only text]"),
        ("video_url", "[video, not shown: this model reads only text]"),
        ("input_file", "[file, not shown: this server keeps no files and fetches none]"),
        ("file", "[file, not shown: this server keeps no files and fetches none]"),
    ],
)
def test_a_line_stands_for_media(kind: str, line: str) -> None:
    content = CONTENT.validate_python([{"type": "text", "text": "a"}, {"type": kind}])
    assert content_of(parts_of(content, "")) == f"a\n{line}"
    _, medium = parts_of(content, "messages[2].content")
    assert isinstance(medium, Media)
    assert medium.place == f"messages.content.{kind}"
    assert MessageParam(role="user", content=content).ignored() == []
