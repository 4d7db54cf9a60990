"""A model for a request's rows, and the memory for their caches, which grows with them."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mlx_server.checkpoints.memory_estimate import KvCost
from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import Generate, PrefillProgress, Token
from mlx_server.errors import EngineDied, ServerError
from mlx_server.pool.actions import Ticket
from mlx_server.pool.entry import LoadedModel, PoolEntry, PrefillView

log = logging.getLogger("mlx_server.pool")

SOON = 512
"""Tokens behind a prompt, or behind what a row has, that memory is reserved for at a time."""

MARGIN = 128
"""Tokens before the end of what is reserved at which more is asked for: as many may be on their way
here, or computed before a row that is preempted has stopped."""


@dataclass(frozen=True)
class MemoryDemand:
    """What a request asks of the memory."""

    kv: KvCost
    prompt_tokens: int
    """Of its longest row."""
    most_tokens: int
    """Of its longest row at its end, with all that may follow."""
    rows: int = 1
    client: str = ""

    @property
    def soon(self) -> int:
        """Tokens that memory is reserved for at first."""
        return min(self.prompt_tokens + SOON, self.most_tokens)

    def nbytes(self, tokens: int) -> int:
        """Of one row."""
        return self.kv.for_tokens(tokens)


@dataclass
class Waiter:
    """Somebody who asked for a lease. One that was cancelled takes no notice any more."""

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
    """Of one request. It counts the tokens of its rows, and reserves memory ahead of them."""

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
        """Of each row that has not finished: of its prompt and of its answer."""
        self._computed: dict[int, int] = {}
        """Prompt tokens of each row whose prompt is partly computed."""

    @property
    def rows(self) -> list[int]:
        return list(self._tokens)

    @property
    def prefilling(self) -> list[PrefillView]:
        return [PrefillView(self._tokens[row], done) for row, done in self._computed.items()]

    def began(self, rows: Sequence[Generate]) -> None:
        """To be called as soon as these were sent to the engine."""
        if self.preempted:
            self._leases.engine().preempt([row.row for row in rows])
        for row in rows:
            self._tokens[row.row] = len(row.prompt)
            self._leases.of_row[row.row] = self
        self._grow()

    def prefilled(self, progress: PrefillProgress) -> None:
        self._computed[progress.row] = progress.computed

    def count_token(self, token: Token) -> None:
        self._computed.pop(token.row, None)
        self._tokens[token.row] += 1
        if token.finish:
            self.left([token.row])
        else:
            self._grow()

    def left(self, rows: Iterable[int]) -> None:
        """They have finished or were cancelled."""
        for row in rows:
            self._tokens.pop(row, None)
            self._computed.pop(row, None)
            self._leases.of_row.pop(row, None)
        if not self._tokens and self._reserved:
            self._set(0)  # until another one begins, or the lease ends

    def _grow(self) -> None:
        longest, most = max(self._tokens.values()), self._demand.most_tokens
        if longest + MARGIN > self._reserved and self._reserved < most:
            self._set(min(longest + SOON, most))

    def _set(self, tokens: int) -> None:
        self._reserved = tokens
        nbytes = self._demand.nbytes(tokens) if tokens else 0
        self._leases.resize(self.ticket, nbytes)


class Leases:
    """Those that are granted."""

    def __init__(
        self, engine: Callable[[], EngineClient], resize: Callable[[Ticket, int], None]
    ) -> None:
        """resize: sets how many bytes each of a ticket's rows may take from now on."""
        self.engine = engine
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
                self.of_row.pop(row, None)

    def preempt(self, ticket: Ticket) -> None:
        lease = self._by_ticket[ticket]
        lease.preempted = True
        log.info("memory is short: an answer of %s waits", lease.model.prepared.id)
        with suppress(EngineDied):
            self.engine().preempt(lease.rows)

    def resume(self, ticket: Ticket) -> None:
        lease = self._by_ticket[ticket]
        lease.preempted = False
        with suppress(EngineDied):
            self.engine().resume(lease.rows)

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
