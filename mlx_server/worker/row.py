"""The rows of a batch: what a request says of its row, and the state of its sampling."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import mlx.core as mx
import numpy as np

from mlx_server.engine.messages import (
    ComputeAhead,
    Generate,
    RowFailed,
    RowLeftGrammar,
    Token,
)
from mlx_server.errors import InvalidGrammar
from mlx_server.fair_queue import of_tier
from mlx_server.loops import LoopDetector
from mlx_server.worker.constrained_decoding.logit_constraints import TOO_LARGE, LogitConstraint
from mlx_server.worker.constrained_decoding.mask_threads import SlowMask
from mlx_server.worker.forward_pass import NO_ADAPTER, RowAdapter
from mlx_server.worker.prefill.memory_tier import Key
from mlx_server.worker.sight import RowPictures
from mlx_server.worker.speculation.draft import Drafter

FIXED_PIECE, EXPERTS_PIECE = 128, 512
"""The tokens of a deterministic prompt that are computed together: more make others wait longer,
and fewer read all experts too often. A change needs another name in `prompt_key_of`."""

Fault = Callable[[], str | None]
"""Returns what was wrong with a draw, once that is computed; None if nothing was."""


@dataclass(frozen=True)
class LateDraw:
    """What a draw needs whose mask was not made in time."""

    logits: mx.array
    """[1, vocabulary]"""
    inputs: mx.array
    """[1], the token that they follow."""
    mask: SlowMask


class Row:
    """One sequence being generated: its parameters and its sampling state."""

    def __init__(self, request: Generate, vocabulary: int) -> None:
        self.request = request
        self.number, self.sampling, self.tier = request.row, request.sampling, request.tier
        self.client = of_tier(request.client, request.tier)
        self.row_adapter = row_adapter_of(request)
        self.prompt_key = prompt_key_of(request)
        self.snapshot_places: tuple[int, ...] = ()
        """The lengths of the prompt at which the prompt cache keeps its state."""
        self.pictures: RowPictures | None = None
        self.constraint: LogitConstraint | None = None
        self.loops = None if request.loops is None else LoopDetector(request.loops)
        self.late: LateDraw | None = None
        """A draw that waits for its mask; meanwhile the row sits steps out."""
        self.undecided: Token | None = None
        """The latest token, if only the mask shows whether the row ends with it, as in a loop."""
        self.sampled = len(request.generated)
        self.fault: Fault = lambda: None
        """The fault of the latest draw, which may not be computed yet."""
        self.error: str | None = None
        """The fault of a draw; None while all were valid."""
        self.deterministic = request.deterministic
        """Whether all passes of the row have the same shapes whatever else the engine does: one row
        alone, pieces of the prompt that begin at multiples of `fixed_piece`, and then one token at
        a time. What such pieces computed may be used again, up to such a multiple."""
        self.fixed_piece = FIXED_PIECE
        self.drafter: Drafter | None = None
        """What proposes the row's next tokens; None for a row that gets one token a pass."""
        self.followed = 0
        """The number of tokens of the answer that the drafter knows."""
        self._is_sent = False
        """Whether the token that the next pass feeds was sent before it."""
        self.drafts: tuple[int, int] | None = None
        """How many drafted tokens the latest pass computed, and how many of them held."""
        seed = request.own_seed if request.sampling.seed is None else request.sampling.seed
        self._seed = os.urandom(8) if seed is None else (seed & (2**64 - 1)).to_bytes(8, "little")
        if self.penalised:
            seen = np.zeros((1, vocabulary), np.bool_)
            seen[0, [id for id in request.tokens if id < vocabulary]] = True
            self.seen = mx.array(seen), 0
            """Which tokens are in the prompt or the answer: the place of a row among those of a
            batch."""
            counts = np.zeros((1, vocabulary), np.float32)
            np.add.at(counts[0], request.generated[:-1], 1)  # the last one counts when it is fed
            self.counts = mx.array(counts), 0
            """How often each token is in the answer, in such a place."""

    @property
    def may_draft(self) -> bool:
        """Whether it may get several tokens a pass: a deterministic row's passes have one shape,
        and a recording with a delay waits before each token."""
        return not self.deterministic and not self.request.delay

    def begins_with(self, token: int) -> bool:
        """Whether the row goes on after this first token, so that it is sent at once. Where there
        is a grammar, that says so only when it is fed, and so does a loop that another engine's
        tokens began."""
        ends = token in self.request.stop_tokens or self.tokens_left == 1
        resumes = bool(self.request.generated)
        self._is_sent = not (
            ends or resumes or self.request.delay or self.constraint or self.fault()
        )
        return self._is_sent

    def was_sent(self) -> bool:
        """Whether a pass returns the row's first token, which was sent before."""
        sent, self._is_sent = self._is_sent, False
        return sent

    @property
    def failure(self) -> str | None:
        """Why the row can't continue; None if it can."""
        return self.error or (self.constraint.failure if self.constraint else None)

    @property
    def is_waiting(self) -> bool:
        """Whether the row's next mask is still being made."""
        return self.late is not None and not self.late.mask.is_made

    def failed(self, failure: str) -> RowFailed | RowLeftGrammar:
        if self.constraint and self.constraint.departure:
            return self.constraint.departure
        number = self.number
        return refused(number, failure) if failure == TOO_LARGE else RowFailed(number, failure)

    @property
    def penalised(self) -> bool:
        s = self.sampling
        return (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def tokens_left(self) -> int:
        """The tokens that the row may generate after those of another engine."""
        return self.request.max_tokens - len(self.request.generated)

    def next_piece(self, computed: int) -> int:
        """Returns the tokens of a deterministic row's next pass after `computed` ones."""
        left = len(self.request.prompt) - 1 - computed
        return min(self.fixed_piece - computed % self.fixed_piece, left) if left > 0 else 1

    def reusable(self, length: int) -> int:
        """Returns how many of a row's first `length` tokens other prompts may continue."""
        if not self.deterministic:
            return length
        length = min(length, len(self.request.prompt) - 1)
        length -= length % self.fixed_piece
        while self.pictures and self.pictures.is_within(length):
            length -= self.fixed_piece
        return length

    def key(self) -> tuple[int, int]:
        """Returns the random key of the row's next draw."""
        digest = blake2b(self._seed + self.sampled.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def refused(row: int, why: object) -> RowFailed:
    """Reports that the row's grammar can't be used."""
    return RowFailed(row, f"The answer can't be constrained: {why}", InvalidGrammar.__name__)


def row_adapter_of(request: Generate | ComputeAhead) -> RowAdapter:
    """Returns the request's adapter and scale. A scale of 0 is the base model, and shares its
    prompt cache."""
    return (
        (request.adapter, request.adapter_scale)
        if request.adapter and request.adapter_scale
        else NO_ADAPTER
    )


def prompt_key_of(request: Generate | ComputeAhead) -> Key:
    """Returns the key under which the prompt store has the prompts of such requests."""
    key = (request.model, *row_adapter_of(request), request.cache_scope)
    is_deterministic = isinstance(request, Generate) and request.deterministic
    return (*key, "deterministic") if is_deterministic else key
