"""A request's lease on a model, with memory for its rows' KV caches that grows with them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import (
    Embed,
    Generate,
    KvCost,
    PreemptRows,
    PrefillProgress,
    ResumeRows,
    Token,
)
from mlx_server.errors import EngineDied, ServerError
from mlx_server.events import RowProgress
from mlx_server.pool.models import LoadedModel, PoolEntry, PrefillView
from mlx_server.pool.reservations import Ticket
from mlx_server.requests import Tier

log = logging.getLogger("mlx_server.pool")

SOON = 512
"""The tokens that a row may still generate before its reservation has to grow again."""

MARGIN = 128
"""A reservation grows when its longest row comes within this many tokens of it. As many tokens may
be in transit from the engine, or be generated before a preempted row stops."""


@dataclass(frozen=True)
class MemoryDemand:
    """The memory that a request needs for its rows."""

    kv: KvCost
    prompt_tokens: int
    """The prompt tokens of the longest row."""
    most_tokens: int
    """The tokens of the longest row at its end, including everything it may still generate."""
    rows: int = 1
    client: str = ""
    tier: Tier = Tier.DEFAULT
    most_padding: int | None = None
    """The most tokens by which the engine pads the model's rows; None: there is no limit."""

    @property
    def padding_bytes(self) -> int | None:
        most = self.most_padding
        return None if most is None else self.kv.padding_bytes(most)

    @property
    def soon(self) -> int:
        """The tokens of each row for which memory is reserved before the rows begin."""
        return min(self.prompt_tokens + SOON, self.most_tokens)

    def nbytes(self, tokens: int) -> int:
        """The bytes of the KV cache of a row of this many tokens."""
        return self.kv.for_tokens(tokens)


@dataclass
class Waiter:
    """A request that waits for a lease. After a cancellation `grant` and `refuse` do nothing."""

    entry: PoolEntry
    demand: MemoryDemand
    granted: asyncio.Future[None]

    def grant(self) -> None:
        if not self.granted.done():
            self.granted.set_result(None)

    def refuse(self, error: ServerError) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)


class Lease:
    """One request's lease. It counts the tokens of its rows and reserves memory before they need
    it."""

    def __init__(
        self, model: LoadedModel, demand: MemoryDemand, ticket: Ticket, leases: "Leases"
    ) -> None:
        self.model = model
        self.ticket = ticket
        self.preempted = False
        self._demand = demand
        self._leases = leases
        self._reserved = demand.soon
        self._tokens: dict[int, int] = {}
        """The tokens, prompt and answer together, of each unfinished row."""
        self._computed: dict[int, int] = {}
        """The prompt tokens computed so far, of each row in prefill."""
        self._decoding_since: float | None = None

    @property
    def engine(self) -> EngineClient:
        """The engine that has the rows. Raises EngineDied while there is none."""
        return self._leases.engine()

    @property
    def rows(self) -> list[int]:
        return list(self._tokens)

    @property
    def prefilling(self) -> list[PrefillView]:
        return [PrefillView(self._tokens[row], done) for row, done in self._computed.items()]

    def progress(self) -> RowProgress:
        return RowProgress(sum(self._computed.values()), self._decoding_since)

    def began(self, rows: Sequence[Generate | Embed]) -> None:
        """Registers rows that were sent to the engine. It must be called in the same turn of the
        event loop, so that the engine gets the prompt cache's new limit before its next step."""
        if self.preempted:
            self._leases.engine().send(PreemptRows([row.row for row in rows]))
        for row in rows:
            self._tokens[row.row] = row.length
            self._leases.of_row[row.row] = self
        self._leases.begin(self.ticket)
        self._grow()

    def prefilled(self, progress: PrefillProgress) -> None:
        self._computed[progress.row] = progress.computed

    def count_token(self, token: Token) -> None:
        self._computed.pop(token.row, None)
        self._decoding_since = self._decoding_since or time.perf_counter()
        self._tokens[token.row] += 1
        if token.finish:
            self.left([token.row])
        else:
            self._grow()

    def left(self, rows: Iterable[int]) -> None:
        """Removes rows that have finished or were cancelled."""
        for row in rows:
            self._tokens.pop(row, None)
            self._computed.pop(row, None)
            self._leases.forget(row, self)
        if not self._tokens and self._reserved:
            self._set(0)  # the lease may begin further rows, for which `began` reserves again

    def _grow(self) -> None:
        longest, most = max(self._tokens.values()), self._demand.most_tokens
        if longest + MARGIN > self._reserved and self._reserved < most:
            self._set(min(longest + SOON, most))

    def _set(self, tokens: int) -> None:
        self._reserved = tokens
        nbytes = self._demand.nbytes(tokens) if tokens else 0
        self._leases.resize(self.ticket, nbytes)


class Leases:
    """The granted leases, by ticket and by row."""

    def __init__(
        self,
        engine: Callable[[], EngineClient],
        begin: Callable[[Ticket], None],
        resize: Callable[[Ticket, int], None],
    ) -> None:
        """begin: called after rows of a ticket were sent to the engine.
        resize: called with the bytes that the ticket's longest row may take from now on."""
        self.engine = engine
        self.begin = begin
        self.resize = resize
        self.of_row: dict[int, Lease] = {}
        self._by_ticket: dict[Ticket, Lease] = {}

    def add(self, model: LoadedModel, demand: MemoryDemand, ticket: Ticket) -> None:
        self._by_ticket[ticket] = Lease(model, demand, ticket, self)

    def __getitem__(self, ticket: Ticket) -> Lease:
        return self._by_ticket[ticket]

    def remove(self, ticket: Ticket) -> None:
        if lease := self._by_ticket.pop(ticket, None):
            for row in lease.rows:
                self.forget(row, lease)

    def forget(self, row: int, lease: Lease) -> None:
        """Removes a row of the lease. A new engine numbers its rows from the start again, so after
        a restart the number may belong to another lease's row, which stays."""
        if self.of_row.get(row) is lease:
            del self.of_row[row]

    def preempt(self, ticket: Ticket) -> None:
        lease = self._by_ticket[ticket]
        lease.preempted = True
        log.info("memory is short: an answer of %s is paused", lease.model.prepared.id)
        with suppress(EngineDied):
            self.engine().send(PreemptRows(lease.rows))

    def resume(self, ticket: Ticket) -> None:
        lease = self._by_ticket[ticket]
        lease.preempted = False
        with suppress(EngineDied):
            self.engine().send(ResumeRows(lease.rows))

    def prefilled(self, progress: PrefillProgress) -> None:
        if lease := self.of_row.get(progress.row):
            lease.prefilled(progress)

    def prefilling(self, model: str) -> tuple[PrefillView, ...]:
        leases = [each for each in self._by_ticket.values() if each.model.prepared.id == model]
        return tuple(view for lease in leases for view in lease.prefilling)

    def count_tokens(self, tokens: Iterable[Token]) -> None:
        for token in tokens:
            if lease := self.of_row.get(token.row):
                lease.count_token(token)
