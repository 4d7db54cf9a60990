"""Media in the forms of all APIs: each is passed on as chat completions have it."""

import base64
from typing import Any

import pytest

from mlx_server.api.content import of_data, of_part, of_url

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR").decode()
URL = f"data:image/png;base64,{PNG}"
SEEN = {"type": "image_url", "image_url": {"url": URL}}
LOW = {**SEEN, "image_url": {"url": URL, "detail": "low"}}


@pytest.mark.parametrize(
    ("part", "passed"),
    [
        ({"image_url": {"url": URL}}, SEEN),
        ({"image_url": URL}, SEEN),
        ({"image_url": {"url": URL, "detail": "low"}}, LOW),
        ({"image_url": URL, "detail": "low"}, LOW),
        ({"image": URL}, SEEN),
        ({"source": {"type": "base64", "media_type": "image/png", "data": PNG}}, SEEN),
        ({"source": {"type": "base64", "data": PNG}}, SEEN),
        ({"source": {"type": "url", "url": URL}}, SEEN),
        ({"data": PNG, "mimeType": "image/png"}, SEEN),
        ({"file_id": "file-1"}, None),
        ({"image_url": None, "file_id": "file-1"}, None),
        ({"image_url": "file:///etc/passwd"}, None),
        ({}, None),
    ],
)
def test_the_forms_of_other_apis(part: Any, passed: Any) -> None:
    assert of_part("image", part, "p").part == passed


def test_audio_is_passed_on_in_openais_form() -> None:
    part = {"input_audio": {"data": "aGk=", "format": "wav"}}
    found = of_part("audio", part, "p")
    assert (found.part, found.about) == ({"type": "input_audio", **part}, "wav")


@pytest.mark.parametrize(
    ("url", "about"),
    [
        (f"data:;base64,{PNG}", "image/png"),
        ("data:;base64,/9j/", "image/jpeg"),
        ("data:;base64,R0lGODlh", "image/gif"),
        ("data:;base64,UklGRg==", "image/webp"),
        ("data:;base64,####", ""),
        ("DATA:" + "x" * 500 + ",", "x" * 64),
        ("https://" + "a" * 500, "https://" + "a" * 192),
    ],
)
def test_what_is_known_of_a_picture_is_short(url: str, about: str) -> None:
    assert of_url("image", url, "p").about == about
    assert of_data("image", PNG, "", "p").about == "image/png"
