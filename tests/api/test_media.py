"""Images and other media: what is known of each, without a library and without decoding them."""

import base64
from typing import Any

import pytest

from mlx_server.api.content import of_data, of_part, of_url
from tests.tables import cases

PICTURES = {
    "png": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    "gif": b"GIF89a",
    "jpeg": b"\xff\xd8\xff\xe0\x00\x04ab",
    "webp": b"RIFF\x00\x00\x00\x00WEBPVP8 ",
}


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("name", PICTURES)
def test_the_type_of_a_picture(name: str) -> None:
    kind = f"image/{name}"
    data = PICTURES[name] + bytes(1000)
    assert of_url("image", url(data, kind), "p").about == kind
    encoded = base64.b64encode(data).decode()
    assert of_data("image", encoded, "", "p").about == kind
    assert of_data("image", url(data, ""), "", "p").about == kind


@cases
def test_odd_urls(given: Any, about: str) -> None:
    found = of_url("image", given, "p")
    assert found.about == about
    passed = isinstance(given, str) and given.lower().startswith(("data:", "http"))
    assert (found.part == {"type": "image_url", "image_url": {"url": given}}) == passed


URL = url(PICTURES["png"])
SEEN = {"type": "image_url", "image_url": {"url": URL}}


@cases
def test_the_forms_of_other_apis(part: Any, passed: Any) -> None:
    wanted = {**SEEN, "image_url": {"url": URL, "detail": "low"}} if passed == "low" else passed
    assert of_part("image", part, "p").part == wanted


def test_audio_is_passed_on_in_openais_form() -> None:
    part = {"input_audio": {"data": "aGk=", "format": "wav"}}
    found = of_part("audio", part, "p")
    assert (found.part, found.about) == ({"type": "input_audio", **part}, "wav")
