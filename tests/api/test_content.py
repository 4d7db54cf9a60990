"""Content as text or in parts; what is no text is refused by its type."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from mlx_server.api.content import Content, text_of
from mlx_server.errors import BadRequest

CONTENT: TypeAdapter[Any] = TypeAdapter(Content)


def read(given: Any) -> str:
    return text_of(CONTENT.validate_python(given), "messages[2].content")


def test_parts_are_lines_of_one_text() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "refusal", "refusal": "no"},
        {"type": "output_text", "text": "b", "annotations": []},
    ]
    assert read(parts) == "a\nno\nb"
    assert read("a") == "a"
    assert text_of(None, "") == ""


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "input_image"])
def test_media_are_refused_by_their_place(kind: str) -> None:
    with pytest.raises(BadRequest, match=kind) as refused:
        read([{"type": "text", "text": "a"}, {"type": kind}])
    assert refused.value.param == "messages[2].content[1].type"


def test_an_unknown_part_is_no_content() -> None:
    with pytest.raises(ValidationError):
        read([{"type": "smell"}])
