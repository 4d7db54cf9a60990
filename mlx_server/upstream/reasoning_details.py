"""Joins the pieces of `reasoning_details`, the signed thoughts of OpenRouter and others."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mlx_server.upstream.growing_text import GrowingText

DETAILS = "reasoning_details"

GROWING = ("text", "summary", "signature")
"""Fields of a detail whose text a stream sends in pieces."""


class ReasoningDetails:
    """The details of one answer, which the next request must send back to the upstream."""

    def __init__(self) -> None:
        self._details: list[dict[str, Any]] = []
        self.size = 0
        """The number of bytes of their JSON, about."""

    def add(self, pieces: Iterable[Mapping[str, Any]]) -> None:
        for piece in pieces:
            if not (self._details and _continues(self._details[-1], piece)):
                self._details.append({})
            self.size += _extend(self._details[-1], piece)

    def found(self) -> dict[str, Any]:
        """The details as the field of a message; empty if there are none."""
        return {DETAILS: [_joined(detail) for detail in self._details]} if self._details else {}


def _continues(detail: Mapping[str, Any], piece: Mapping[str, Any]) -> bool:
    """Whether a piece continues the last detail. Encrypted details always come in one piece."""
    if "data" in piece or "data" in detail:
        return False
    return all(detail.get(name) == piece.get(name) for name in ("type", "index"))


def _extend(detail: dict[str, Any], piece: Mapping[str, Any]) -> int:
    """Adds a piece to its detail; returns the number of bytes that the detail grew by, about."""
    size = 0
    for name, value in piece.items():
        before = detail.get(name)
        if name in GROWING and isinstance(value, str):
            pieces = before if isinstance(before, GrowingText) else GrowingText()
            pieces.add(value)
            detail[name] = pieces
            size += len(value)
        elif name not in detail or not (value is None or value == before):
            detail[name] = value
            size += len(name) + len(msgspec.json.encode(value))
    return size


def _joined(detail: Mapping[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, GrowingText) else v for k, v in detail.items()}
