"""The recorded tokens of a replay model's row, compared with what its grammar allows."""

from collections.abc import Collection, Sequence

import numpy as np

from mlx_server.engine.messages import Generate
from mlx_server.worker.constrained_decoding.token_trie import Bitmask

SHOWN = 8
"""The number of allowed tokens that are reported."""
BEFORE = 60
"""The number of recorded tokens before the refused one that are reported."""


class LeftGrammar(Exception):
    """The grammar does not allow the next recorded token."""

    def __init__(
        self, at: int, before: list[int], token: int, allowed: list[int], others: int
    ) -> None:
        """at, before: how many tokens were played, and the last of them. others: how many tokens
        are allowed besides `allowed`."""
        super().__init__(f"token {at} of the recording")
        self.at, self.before, self.token = at, before, token
        self.allowed, self.others = allowed, others


class RecordedTokens:
    def __init__(self, tokens: Sequence[int], *, is_cut: bool = False) -> None:
        """is_cut: the recorded output was cut off at its end."""
        self._tokens = tokens
        self.is_cut = is_cut
        self.played = 0
        """The number of recorded tokens that the row has generated so far."""
        self._closes = False
        """Whether the token limit has made the row leave its recording for the grammar's end."""

    @property
    def _next(self) -> int:
        return self._tokens[min(self.played, len(self._tokens) - 1)]

    def check(self, allowed: Bitmask, texts: Sequence[bytes]) -> None:
        """Raises LeftGrammar. texts: the bytes of each token."""
        if self._closes or _has(allowed, self._next):
            return
        ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")).tolist()
        shortest = sorted(ids, key=lambda id: len(texts[id]) if id < len(texts) else 0)[:SHOWN]
        before = list(self._tokens[: self.played][-BEFORE:])
        raise LeftGrammar(self.played, before, self._next, shortest, len(ids) - len(shortest))

    def close(
        self, allowed: Bitmask, ending: Sequence[int] | None, stop_tokens: Collection[int]
    ) -> None:
        """Reduces the allowed tokens to the ending's first one once the limit excludes the recorded
        token: all others are equally likely to a model without weights."""
        self._closes = self._closes or not _has(allowed, self._next)
        if self._closes and ending is not None:
            following = ending[0] if ending else next(iter(stop_tokens))
            if _has(allowed, following):
                allowed[:] = 0
                allowed[following // 32] = np.uint32(1 << following % 32)


def recorded_tokens_of(request: Generate) -> RecordedTokens | None:
    if not (request.forced_tokens and request.recording):
        return None
    return RecordedTokens(request.forced_tokens, is_cut=request.recording_is_cut)


def _has(allowed: Bitmask, token: int) -> bool:
    return token // 32 < len(allowed) and bool(allowed[token // 32] >> np.uint32(token % 32) & 1)
