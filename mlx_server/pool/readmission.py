"""Lets requests into the engine that replaces a lost one.

A request that ends its engine would end the next one too, and with it the answers of all others. So
those that an engine had take turns: each waits until the one before has had a token. If an engine
is lost in a turn, that request has ended it as far as is known; the second time it fails alone.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from hashlib import sha256
from itertools import count

import msgspec

from mlx_server import limits
from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import Embed, Generate
from mlx_server.errors import EngineDied, ModelSuspended, RequestEndsEngine
from mlx_server.pool.lease import Lease
from mlx_server.pool.scheduler import now

LONGEST_TURN = 5.0
"""Seconds after which the next request is let in, though a long prompt has no token yet; four times
as many for each further engine that is lost while several have none, so that in the end the one
that ends them is alone."""

MINUTE = 60.0


class Attempts:
    """A request, and what became of it in the engines that had it."""

    def __init__(self, model: str, fingerprint: Callable[[], str]) -> None:
        """fingerprint: equal for requests that ask for the same."""
        self.model, self.fingerprint = model, cache(fingerprint)
        self.is_done = False
        self.losses = 0
        """The number of engines that were lost while they had it."""
        self.strikes = 0
        """How many of these in a row it has ended, as far as is known."""
        self.doubts = 0
        """How many of these in a row it or another one has ended."""
        self.was_sent = self.has_answered = False
        """Whether the present engine was given its rows, and whether one has had a token."""
        self.number = 0
        """The request's place in the order of arrival."""
        self.lost_by: EngineDied | None = None
        """The latest error by which it was lost."""
        self.came_after = 0
        """The number of losses before it was let in."""


class Readmission:
    """The requests of one engine and of those that replace it."""

    def __init__(self, running: Callable[[], Awaitable[EngineClient]]) -> None:
        """running: waits for the next engine if the present one is lost. Raises EngineDied."""
        self._running = running
        self._engine: EngineClient | None = None
        """The latest engine; None before there was one."""
        self._has_lost_rows = False
        self._losses = 0
        """How often an engine, or what it had computed, was lost."""
        self._inside: list[Attempts] = []
        """The requests that the present engine has, or that wait for it to load their model."""
        self._returning: list[Attempts] = []
        """Those that wait for their turn, and the one whose turn it is."""
        self._turn: Attempts | None = None
        self._timer: asyncio.TimerHandle
        """It ends the turn, if there is one."""
        self._changed = asyncio.Event()
        self._numbers = count()
        self._answered: set[str] = set()
        """The models that have answered since the engine has run."""
        self._deaths: dict[str, deque[float]] = {}
        """The times at which an engine was lost without an answer of the model."""
        self._fatal: dict[str, None] = {}
        """The fingerprints of the requests that have ended engines, the latest last."""
        self.resumed = 0
        """The number of requests that have gone on in another engine."""

    @property
    def present(self) -> int:
        """The number of requests that the engine has, or had if it was lost just now."""
        return len(self._inside)

    @asynccontextmanager
    async def visit(
        self, attempts: Attempts, lease: Callable[[], AbstractAsyncContextManager[Lease]]
    ) -> AsyncIterator[Lease]:
        """Gives the request a lease. If the engine is lost meanwhile, the block is left without an
        error, and has to be entered again unless `attempts.is_done`."""
        has_begun = False
        while not has_begun:
            await self._enter(attempts)
            try:
                async with lease() as leased:
                    has_begun = True
                    yield leased
                attempts.is_done = True
            except EngineDied as error:
                attempts.losses += 1
                attempts.lost_by = error
                self._end_turn(attempts)  # it stays inside, until it is known what the next one is
            except BaseException:
                self._leave(attempts)
                raise
            else:
                self._leave(attempts)

    def lose(self) -> None:
        """Notes that the engine has lost all rows, though it may go on."""
        self._has_lost_rows = True

    def answered(self, attempts: Attempts) -> None:
        if not attempts.has_answered:
            attempts.has_answered, attempts.strikes, attempts.doubts = True, 0, 0
            self._answered.add(attempts.model)
            self._end_turn(attempts)

    async def _enter(self, attempts: Attempts) -> None:
        attempts.number = attempts.number or next(self._numbers) + 1
        try:
            try:
                self._judge(await self._running())
            except EngineDied as error:
                raise attempts.lost_by or error  # noqa: B904  there is no other engine
            if attempts.lost_by and attempts.came_after == self._losses:
                raise attempts.lost_by  # another attempt would end as soon
            self._check(attempts)
            if attempts.losses:
                await self._take_turn(attempts)
            while self._returning and not attempts.losses:
                await self._changed.wait()
            self._judge(await self._running())  # much may have happened meanwhile
            self._check(attempts)
        except BaseException:
            self._leave(attempts)
            raise
        attempts.came_after = self._losses
        self._inside.append(attempts)

    def _judge(self, engine: EngineClient) -> None:
        """Finds out which request has ended the engine before this one, or what it had computed."""
        before, self._engine = self._engine, engine
        has_lost_rows, self._has_lost_rows = self._has_lost_rows, False
        if before is None or (before is engine and not has_lost_rows):
            return
        self._losses += 1
        suspects = [each for each in self._inside if each.was_sent and not each.has_answered]
        if len(suspects) == 1 and engine is not before:
            suspects[0].strikes += 1
        elif engine is not before:
            for each in suspects:
                each.doubts += 1
        for model in {each.model for each in self._inside} - self._answered:
            self._deaths.setdefault(model, deque(maxlen=limits.MODEL_DEATHS)).append(now())
        self.resumed += len(self._inside)
        for each in self._inside:
            each.was_sent = each.has_answered = False
        self._inside.clear()
        self._answered.clear()

    def _check(self, attempts: Attempts) -> None:
        time = now()
        if attempts.strikes >= limits.REQUEST_DEATHS:
            self._fatal[attempts.fingerprint()] = None
            self._fatal = dict([*self._fatal.items()][-limits.FATAL_REQUESTS :])
        if self._fatal and attempts.fingerprint() in self._fatal:
            raise RequestEndsEngine(
                f"This request has ended the engine process {limits.REQUEST_DEATHS} times, so it "
                "is not tried again. Other answers went on. Send a shorter or another request, and "
                "please report it with the server's log."
            )
        deaths, most = [*self._deaths.get(attempts.model, ())], limits.MODEL_DEATHS
        if len(deaths) == most and deaths[-1] - deaths[0] < MINUTE > time - deaths[-1]:
            raise ModelSuspended(
                f"{attempts.model} has ended the engine process {most} times within a minute, so "
                "it is not used for a minute. Other models go on. See the server's log."
            )

    async def _take_turn(self, attempts: Attempts) -> None:
        self._returning.append(attempts)
        await asyncio.sleep(0)  # others were woken too
        while self._turn or attempts is not min(self._returning, key=_order):
            await self._changed.wait()
        self._turn = attempts
        loop = asyncio.get_running_loop()
        seconds = LONGEST_TURN * 4 ** max(0, attempts.doubts - 1)
        self._timer = loop.call_later(seconds, self._end_turn, attempts)

    def _leave(self, attempts: Attempts) -> None:
        self._end_turn(attempts)
        if attempts in self._inside:
            self._inside.remove(attempts)

    def _end_turn(self, attempts: Attempts) -> None:
        if attempts in self._returning:
            self._returning.remove(attempts)
            if self._turn is attempts:
                self._turn = None
                self._timer.cancel()
            self._changed.set()
            self._changed = asyncio.Event()


def _order(attempts: Attempts) -> tuple[int, int]:
    return attempts.strikes, attempts.number


def fingerprint(rows: Iterable[Generate | Embed]) -> str:
    """The same for all rows that ask for the same."""
    digest = sha256()
    for row in rows:
        if isinstance(row, Generate):
            # the ids of the prompt tell pictures apart
            row = msgspec.structs.replace(row, own_seed=None, generated=[], pictures=[])
        digest.update(msgspec.msgpack.encode(msgspec.structs.replace(row, row=0, client="")))
    return digest.hexdigest()
