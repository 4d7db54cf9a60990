"""Joins the pieces of `reasoning_details`, the signed thoughts of OpenRouter and others."""

from collections.abc import Iterable, Mapping
from typing import Any

DETAILS = "reasoning_details"

GROWING = ("text", "summary", "signature")
"""Fields of a detail whose text a stream sends in pieces."""


class ReasoningDetails:
    """The details of one answer, which the next request must send back to the upstream."""

    def __init__(self) -> None:
        self._details: list[dict[str, Any]] = []

    def add(self, pieces: Iterable[Mapping[str, Any]]) -> None:
        for piece in pieces:
            if self._details and _continues(self._details[-1], piece):
                _extend(self._details[-1], piece)
            else:
                self._details.append(dict(piece))

    def found(self) -> dict[str, Any]:
        """The details as the field of a message; empty if there are none."""
        return {DETAILS: self._details} if self._details else {}


def _continues(detail: Mapping[str, Any], piece: Mapping[str, Any]) -> bool:
    """Whether a piece continues the last detail. Encrypted details always come in one piece."""
    if "data" in piece or "data" in detail:
        return False
    return all(detail.get(name) == piece.get(name) for name in ("type", "index"))


def _extend(detail: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for name, value in piece.items():
        before = detail.get(name)
        if name in GROWING and isinstance(before, str) and isinstance(value, str):
            detail[name] = before + value
        elif value is not None:
            detail[name] = value
