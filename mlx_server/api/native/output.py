"""Folds events into the body of a /generate answer."""

from collections.abc import AsyncIterator
from typing import Any

from mlx_server import limits
from mlx_server.api import strict_json
from mlx_server.api.accumulator import Accumulator
from mlx_server.errors import BadRequest
from mlx_server.events import Event, ToolCallStarted
from mlx_server.messages import ToolCall

Wire = dict[str, Any]


class _InvalidCall(Exception):
    """A call whose arguments can't be used."""


class NativeOutput:
    def __init__(self, *, model: str) -> None:
        self._accumulator = Accumulator(model=model, prompts=1, n=1)
        self._pieces_before: dict[str, int] = {}
        """The number of text deltas before a call, by the call's id."""

    async def aggregate(self, events: AsyncIterator[Event]) -> Wire:
        (answer,) = self._accumulator.answers
        async for event in events:
            self._accumulator.add(event)
            if isinstance(event, ToolCallStarted):
                self._pieces_before.setdefault(event.id, len(answer.texts))
        calls, errors = _checked(answer.calls)
        pieces = self._pieces_before[answer.calls[0].id] if answer.calls else None
        before = "".join(answer.texts[:pieces])
        after = "" if pieces is None else "".join(answer.texts[pieces:]).lstrip()
        return {
            "model": self._accumulator.model,
            "thinking": "".join(answer.reasoning),
            "response": before,
            "tool_calls": calls,
            "pre_tool_text": before if answer.calls else None,
            **({"post_tool_text": after} if after else {}),
            "finish_reason": "error" if errors and not calls else answer.finish_reason,
            **({"errors": errors} if errors else {}),
            "usage": self._accumulator.usage(),
            **self._accumulator.warnings(answer),
        }


def _checked(calls: list[ToolCall]) -> tuple[list[Wire], list[Wire]]:
    """The valid calls, and an error for each of the others."""
    good, errors = [], []
    for call in calls:
        named = {"id": call.id, "name": call.name}
        try:
            good.append({**named, "arguments": _arguments(call.arguments)})
        except _InvalidCall as refused:
            errors.append({**named, "message": str(refused)})
    return good, errors


def _arguments(text: str) -> dict[str, Any]:
    raw = text.encode(errors="surrogatepass")
    if len(raw) > limits.NATIVE_ARGUMENTS_BYTES:
        raise _InvalidCall(
            f"The arguments have {len(raw)} bytes; the limit is "
            f"{limits.NATIVE_ARGUMENTS_BYTES >> 10} KiB."
        )
    try:
        return strict_json.parse_object(raw)
    except BadRequest as error:
        raise _InvalidCall(f"The arguments are not a JSON object: {error.message}") from None
