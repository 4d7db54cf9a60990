"""Joins the pieces of `reasoning_details`, the signed thoughts of OpenRouter and others."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mlx_server.upstream.growing_text import GrowingText

DETAILS = "reasoning_details"

GROWING = ("text", "summary", "signature")
"""Fields of a detail whose text a stream sends in pieces."""


class ReasoningDetails:
    """The details of one answer, which the next request must send back to the upstream. Until then
    they are kept as JSON, which takes less memory than their values."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, pieces: Iterable[Mapping[str, Any]]) -> None:
        self._pieces += map(msgspec.json.encode, pieces)

    def found(self) -> dict[str, Any]:
        """The details as the field of a message; empty if there are none."""
        details: list[dict[str, Any]] = []
        for piece in map(msgspec.json.decode, self._pieces):
            if not (details and _continues(details[-1], piece)):
                details.append({})
            _extend(details[-1], piece)
        return {DETAILS: [_joined(detail) for detail in details]} if details else {}


def _continues(detail: Mapping[str, Any], piece: Mapping[str, Any]) -> bool:
    """Whether a piece continues the last detail. Encrypted details always come in one piece."""
    if "data" in piece or "data" in detail:
        return False
    return all(detail.get(name) == piece.get(name) for name in ("type", "index"))


def _extend(detail: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for name, value in piece.items():
        before = detail.get(name)
        if name in GROWING and isinstance(value, str):
            pieces = before if isinstance(before, GrowingText) else GrowingText()
            pieces.add(value)
            detail[name] = pieces
        elif value is not None or name not in detail:
            detail[name] = value


def _joined(detail: Mapping[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, GrowingText) else v for k, v in detail.items()}
