"""A pass in which rows bring drafts: each position is drawn as a single step would draw it, and a
draft holds for as long as it equals what was drawn.

A row's input is what its caches don't have yet: tokens that were taken back from recurrent states,
the token that was drawn last, and its draft. Rows without a draft ride along.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import mlx.core as mx
import numpy as np

from mlx_server.worker.constrained_decoding.logit_constraints import (
    AdditiveMask,
    LogitConstraint,
    Mask,
    has_token,
)
from mlx_server.worker.constrained_decoding.vocabulary import Bitmask
from mlx_server.worker.row import Fault, Row

T = TypeVar("T")


@dataclass
class RowPass:
    """What a row brings to the pass, and what it gets of it."""

    row: Row
    unfed: list[int]
    """Tokens of its answer that its caches don't have."""
    next: int
    """The token that was drawn last."""
    draft: list[int]
    bitmasks: list[Bitmask | None] = field(default_factory=list)
    """Those of the draws after the next token and after each of the draft."""
    constraints: list[LogitConstraint] = field(default_factory=list)
    """The row's constraint after each of these tokens."""
    draws: list[Row] = field(default_factory=list)
    """The row as it is at each of these draws."""

    @property
    def fed(self) -> list[int]:
        return [*self.unfed, self.next, *self.draft]

    @property
    def inputs(self) -> list[int]:
        """The tokens after which the row draws."""
        return [self.next, *self.draft]

    def walk(self, words: int) -> None:
        """Steps the row's constraint along the draft, which ends where it is not allowed, where
        another grammar begins, or where a mask takes too long."""
        if (own := self.row.constraint) is None:
            self.bitmasks = [None] * len(self.inputs)
            return
        constraint = own
        for at, token in enumerate(self.inputs):
            if at and not constraint.threads.fits(constraint):
                break
            bitmask = np.empty(words, np.uint32)
            read = token if self.row.sampled + at else None
            restricts = constraint.threads.make(constraint, read, bitmask)
            if at and constraint.failure:
                break  # it fails only if its tokens come
            self.bitmasks.append(bitmask if restricts else None)
            self.constraints.append(constraint)
            following = self.draft[at] if at < len(self.draft) else None
            is_allowed = following is not None and (not restricts or has_token(bitmask, following))
            if constraint.failure or not is_allowed or not constraint.has_grammar_of(own):
                break
            constraint = constraint.copy() if at else own.look_ahead()
        own.look_back()
        del self.draft[len(self.bitmasks) - 1 :]

    def prepare_draws(self) -> None:
        """Makes the row as it will be at each draw, if the draft holds until there."""
        row = self.row
        for at in range(len(self.inputs)):
            draw = copy(row)
            draw.sampled = row.sampled + at
            if at and row.penalised:
                before = mx.array(self.inputs[:at])
                generated = mx.array([float(row.sampled + n > 0) for n in range(at)])
                counts, seen = row.counts[0][row.counts[1]], mx.array(row.seen[0][row.seen[1]])
                seen[before] = True
                draw.seen = seen[None], 0
                draw.counts = counts.at[before].add(generated)[None], 0
            self.draws.append(draw)

    def holds(self, drawn: Sequence[int]) -> int:
        """Returns how many tokens of the draft were drawn."""
        pairs = zip(self.draft, drawn, strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), len(self.draft))

    def commit(self, tokens: int) -> None:
        """Takes the row on by so many tokens, the next one and those of the draft."""
        row, draw = self.row, self.draws[tokens - 1]
        faults: list[Fault] = [row.fault, *(each.fault for each in self.draws[: tokens - 1])]
        row.error = next((error for fault in faults if (error := fault())), None)
        row.sampled, row.fault = draw.sampled, draw.fault
        row.drafts = (len(self.draft), tokens - 1) if self.draft else None
        if row.penalised:
            row.seen, row.counts = draw.seen, draw.counts
        if row.constraint and tokens > 1:
            row.constraint.become(self.constraints[tokens - 1], self.draft[: tokens - 1])


class DraftPass:
    """The rows of a pass."""

    def __init__(self, rows: Sequence[RowPass], width: int) -> None:
        """width: the vocabulary's."""
        self.rows = list(rows)
        constraints = [each.row.constraint for each in rows if each.row.constraint]
        if constraints:
            constraints[0].threads.begin_step({each.client for each in constraints})
        for each in self.rows:
            each.walk(-(-width // 32))
            each.prepare_draws()
        self._width = width
        self.lengths = [len(each.fed) for each in self.rows]

    @property
    def tokens(self) -> mx.array:
        """The input, [rows, tokens], padded at the right."""
        longest = max(self.lengths)
        return mx.array([each.fed + [0] * (longest - len(each.fed)) for each in self.rows])

    @property
    def places(self) -> tuple[mx.array, mx.array]:
        """The rows and columns of the input after which tokens are drawn."""
        pairs = [
            (at, len(each.unfed) + n)
            for at, each in enumerate(self.rows)
            for n in range(len(each.inputs))
        ]
        rows, columns = zip(*pairs, strict=True)
        return mx.array(rows), mx.array(columns)

    @property
    def draws(self) -> list[Row]:
        return [draw for each in self.rows for draw in each.draws]

    @property
    def inputs(self) -> mx.array:
        return mx.array([token for each in self.rows for token in each.inputs])

    @property
    def mask(self) -> Mask | None:
        bitmasks = [bitmask for each in self.rows for bitmask in each.bitmasks]
        return AdditiveMask.of(bitmasks, self._width)

    def by_row(self, values: Sequence[T]) -> list[list[T]]:
        """Cuts what was computed at each draw by the rows."""
        each = iter(values)
        return [list(islice(each, len(row.draws))) for row in self.rows]
