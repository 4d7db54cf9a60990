"""Checks that all ranks have drawn the same tokens."""

import threading
from collections.abc import Sequence
from zlib import crc32

import msgspec

from mlx_server.engine.messages import Report, StepOutput

CHECK_STEPS = 16
"""Steps with tokens between two comparisons."""


class TokenDigest:
    """A running digest of the tokens of all steps, in their order."""

    def __init__(self) -> None:
        self.steps = 0
        self.value = 0

    def add(self, reports: Sequence[Report]) -> bool:
        """Returns whether the digest is to be compared now."""
        due = False
        for report in reports:
            if isinstance(report, StepOutput) and report.tokens:
                drawn = [(token.row, token.id, token.finish) for token in report.tokens]
                self.value = crc32(msgspec.msgpack.encode(drawn), self.value)
                self.steps += 1
                due = due or self.steps % CHECK_STEPS == 0
        return due


class Comparison:
    """Compares rank 0's digests with those of the other ranks, which may arrive earlier or
    later."""

    def __init__(self, others: int) -> None:
        self._others = others
        self._own: dict[int, int] = {}
        self._reported: dict[int, dict[int, int]] = {}
        """The digests by step and rank."""
        self._lock = threading.Lock()

    def own(self, digest: TokenDigest) -> int | None:
        """Adds rank 0's digest. Returns a rank whose digest of the same step differs, None if there
        is none."""
        with self._lock:
            self._own[digest.steps] = digest.value
            return self._differing(digest.steps)

    def reported(self, rank: int, steps: int, value: int) -> int | None:
        """Adds another rank's digest. Returns the rank if it differs from rank 0's, None if not."""
        with self._lock:
            self._reported.setdefault(steps, {})[rank] = value
            return self._differing(steps)

    def _differing(self, steps: int) -> int | None:
        if steps not in self._own:
            return None
        reported, own = self._reported.get(steps, {}), self._own[steps]
        if len(reported) == self._others:
            del self._own[steps], self._reported[steps]
        return next((rank for rank, value in reported.items() if value != own), None)
