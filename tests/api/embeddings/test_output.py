"""Vectors as numbers and as base64 of their bytes, which OpenAI's client reads."""

import struct
from base64 import b64decode
from typing import Any

import msgspec

from mlx_server.api.embeddings import listed, numbers, written_as_base64
from mlx_server.generation.embeddings import Embeddings

VECTOR = struct.pack("<3f", 0.5, -1.0, 0.25)


def body(write: Any) -> Any:
    found = Embeddings("m", (VECTOR, VECTOR), 7)
    return msgspec.json.decode(msgspec.json.encode(listed(found, "m", write)))


def test_vectors_are_listed_in_order_with_their_usage() -> None:
    found = body(numbers)
    assert [each["index"] for each in found["data"]] == [0, 1]
    assert found["data"][0]["embedding"] == [0.5, -1.0, 0.25]
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


def test_base64_is_that_of_the_bytes() -> None:
    assert b64decode(body(written_as_base64)["data"][1]["embedding"]) == VECTOR
