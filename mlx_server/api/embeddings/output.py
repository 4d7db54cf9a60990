"""Embeddings on the wire: lists of numbers, or base64 of their bytes."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import msgspec

from mlx_server.generation.embeddings import Embeddings


def listed(
    found: Embeddings, model: str, write: Callable[[bytes], str | msgspec.Raw]
) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": write(vector)}
        for index, vector in enumerate(found.vectors)
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def written_as_base64(vector: bytes) -> str:
    return b64encode(vector).decode()


def numbers(vector: bytes) -> msgspec.Raw:
    """The vector as JSON: a list of Python's numbers takes several times the memory."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return msgspec.Raw(msgspec.json.encode(values.tolist()))
