"""Reads the log probabilities of an upstream's tokens, in chat completions and completions."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from mlx_server.events import TokenLogprob


def logprobs_of(choice: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """The log probabilities of a choice, without entries that lack a token or a number."""
    found = choice.get("logprobs")
    if not isinstance(found, Mapping):
        return ()
    if isinstance(content := found.get("content"), list):
        return tuple(_of_chat(content))
    return tuple(_of_completions(found))


def _of_chat(content: list[Any]) -> Iterator[TokenLogprob]:
    for entry in content:
        if isinstance(entry, Mapping):
            top = entry.get("top_logprobs")
            yield from _token_logprob(
                entry.get("token"),
                entry.get("logprob"),
                entry.get("bytes"),
                tuple(_of_chat(top)) if isinstance(top, list) else (),
            )


def _of_completions(found: Mapping[str, Any]) -> Iterator[TokenLogprob]:
    tokens, values, tops = (
        each if isinstance(each := found.get(name), list) else []
        for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    for token, value, top in zip_longest(tokens, values, tops):
        likely = top.items() if isinstance(top, Mapping) else ()
        yield from _token_logprob(
            token, value, None, tuple(each for pair in likely for each in _token_logprob(*pair))
        )


def _token_logprob(
    token: object, value: object, spelled: object = None, top: tuple[TokenLogprob, ...] = ()
) -> Iterator[TokenLogprob]:
    if not isinstance(token, str) or isinstance(value, bool) or not isinstance(value, int | float):
        return
    try:
        raw = bytes(spelled) if isinstance(spelled, list) else token.encode()
    except (TypeError, ValueError):
        raw = token.encode("utf-8", "replace")
    yield TokenLogprob(token, raw, float(value), top)


class LogprobQueue:
    """Assigns log probabilities to the texts that their tokens make, in linear time."""

    def __init__(self, top: int) -> None:
        """top: the number of alternatives that the client requested."""
        self._top = top
        self._waiting = deque[TokenLogprob]()
        self._bytes = bytearray()
        """The bytes of the last token taken that no text has used yet, then those of the waiting
        tokens."""
        self._left = 0
        self.has_had_any = False

    def add(self, found: Iterable[TokenLogprob]) -> None:
        for each in found:
            self.has_had_any = True
            top = sorted(each.top, key=lambda other: -(other.logprob or 0.0))[: self._top]
            self._waiting.append(replace(each, top=tuple(top)))
            self._bytes += each.bytes

    def clear(self) -> None:
        self._waiting.clear()
        self._bytes.clear()
        self._left = 0

    def of(self, text: str) -> tuple[TokenLogprob, ...]:
        """Takes the log probabilities of the text's tokens. Those of earlier tokens, which are not
        text, are dropped; those of later tokens wait for the next text."""
        wanted = text.encode("utf-8", "replace")
        begin = self._bytes.find(wanted)
        if begin < 0:  # a repair has changed the text
            self.clear()
            return ()
        taken, at, end = [], self._left, begin + len(wanted)
        while self._waiting and at < end:
            each = self._waiting.popleft()
            at += len(each.bytes)
            if at > begin:
                taken.append(each)
        del self._bytes[:end]
        self._left = max(0, at - end)
        return tuple(taken)
