"""Decides which masks of a step are made at once, and makes the others in threads of their own.

A mask takes a tenth of a millisecond for most grammars, and seconds for one that reads the same
text in many ways. All masks of a step share one time budget, about half the time of a step, and
clients have equal parts of it. A row whose mask does not fit sits steps out: its mask is made in a
thread while the other rows go on, and the row goes on where it was once that is done. So a slow
grammar's matcher has to let other threads run.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import consume_token_par
from numpy.typing import NDArray

from mlx_server import limits
from mlx_server.fair_queue import address_of
from mlx_server.grammars.compiler import BYTES, STACK_BYTES
from mlx_server.system.process import yield_processor

T = TypeVar("T")

SHARE = 0.5
"""The part of a step's time that its masks may take, which are made while its logits are
computed."""
LEAST_SECONDS = 0.005
MOST_SECONDS = 0.05
"""Bounds on that time, however long the steps take."""

TRUSTED = 64
"""After a mask that did not fit, so many have to fit before the row's next one is made at once; and
after as many more, even if other rows of its client took too long."""

TOO_SLOW = (
    f"its grammar took more than {limits.GRAMMAR_TOKEN_SECONDS} seconds for one token. Make "
    "it simpler: let fewer of its rules match the same text."
)


SLOW_SECONDS = 0.001
"""The time to consume one token from which on a matcher is slow: fifty times the usual one."""

EMPTY = 'start: ""\n'


class RowGone(Exception):
    """The result is no longer needed."""


class YieldingMatcher:
    """A grammar's matcher whose slow calls let other threads run.

    llguidance holds the GIL while a matcher consumes or validates tokens. That takes microseconds
    for most grammars, but up to a second for one that reads the same text in many ways. For such a
    grammar the same is computed by the calls that release the GIL, which cost more.
    """

    def __init__(self, own: LLMatcher) -> None:
        self.own = own
        """The matcher itself, for calls that are quick."""
        self.read = 0
        """The number of tokens that it has consumed."""
        self.is_abandoned = False
        """Whether calls raise RowGone. Another thread sets it."""
        self._seconds = (0.0, 0.0)
        """The time of the two latest calls that consumed: one alone may have been interrupted."""
        self._other: LLMatcher | None = None
        """llguidance releases the GIL for several matchers only: this one is the second."""

    @property
    def is_slow(self) -> bool:
        return min(self._seconds) > SLOW_SECONDS

    def consume_token(self, token: int) -> bool:
        self._check()
        began = time.perf_counter()
        consumed = self._consume_unlocked(token) if self.is_slow else self.own.consume_token(token)
        self._seconds = self._seconds[1], time.perf_counter() - began
        self.read += consumed
        return consumed

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        """Consumes tokens until one that may not come, and returns how many. It is quick."""
        count = self.own.try_consume_tokens([*tokens])
        self.read += count
        return count

    def rollback(self, tokens: int) -> None:
        self.own.rollback(tokens)
        self.read -= tokens

    def _consume_unlocked(self, token: int) -> bool:
        self._other = self._other or LLMatcher(BYTES, EMPTY, log_level=0)
        pairs = [(self.own, token), (self._other, BYTES.eos_token)]
        return consume_token_par(_executor(), pairs)[0]

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        return all(map(self.consume_token, tokens))

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """Returns how many of the tokens may come next, one after another."""
        self._check()
        if self.is_slow:
            return self._validate_unlocked(tokens)
        return self.own.validate_tokens(list(tokens))

    def _validate_unlocked(self, tokens: Sequence[int]) -> int:
        taken = 0
        try:
            while taken < len(tokens) and self._allows(tokens[taken]):
                if taken + 1 == len(tokens):
                    return len(tokens)
                self.consume_token(tokens[taken])
                taken += 1
                if self.own.is_stopped():
                    break
            return taken
        finally:
            self.rollback(taken)

    def _allows(self, token: int) -> bool:
        """Whether the mask has the token. It is computed by a copy, which may exceed a limit that
        no single token exceeds."""
        copy = self.own.deep_copy()
        mask = copy.compute_bitmask()
        if copy.is_error():
            return self.own.validate_tokens([token]) == 1
        return token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)

    def copy(self) -> "YieldingMatcher":
        """Returns a copy that fails alone."""
        copy = YieldingMatcher(self.own.deep_copy())
        copy._seconds, copy.read = self._seconds, self.read
        return copy

    def _check(self) -> None:
        if self.is_abandoned:
            raise RowGone


@cache
def _executor() -> LLExecutor:
    return LLExecutor(2)


class Constraint(Protocol):
    """What is scheduled here: a row's constraint."""

    client: str
    history: "MaskHistory"

    @property
    def lexer(self) -> object:
        """What rows of the same grammar share: two of them can't be computed at the same time."""

    def step(self, token: int | None, bitmask: NDArray[np.uint32]) -> bool: ...

    def fail(self, failure: str) -> None: ...


@dataclass
class MaskHistory:
    """How long the masks of a row have taken."""

    seconds: float = 0.0
    """The time of the latest one."""
    before: float = 0.0
    """And of the one before: one alone may have been interrupted."""
    quick: int = 1
    """The number of masks in a row that fitted into a step; negative after one that did not."""

    def add(self, seconds: float, share: float) -> None:
        self.before, self.seconds = self.seconds, seconds
        self.quick = self.quick + 1 if seconds <= share else -TRUSTED

    @property
    def is_slow(self) -> bool:
        """Whether the row's matcher takes too long to look for drafts. All ranks say the same."""
        return min(self.before, self.seconds) > SLOW_SECONDS


@dataclass
class SlowMask:
    """A row's next mask, which is made in a thread."""

    constraint: Constraint
    token: int | None
    bitmask: NDArray[np.uint32]
    share: float
    began: float = 0.0
    task: Future[bool] | None = field(default=None)
    restricts: bool | None = None
    """Whether the mask excludes tokens; None until it is made."""

    @property
    def is_made(self) -> bool:
        return self.restricts is not None

    def end(self) -> None:
        """Takes the result of the thread, unless the row has failed before."""
        assert self.task
        if error := self.task.exception():  # a panic in llguidance
            self.fail(f"its grammar could not be followed: {error}")
        elif not self.is_made:
            self.restricts = self.task.result()

    def fail(self, failure: str) -> None:
        self.constraint.fail(failure)
        self.restricts = False


class MaskThreads:
    """Used by one thread; the threads that make masks call `wake` when one is made."""

    def __init__(
        self,
        wake: Callable[[], None],
        clock: Callable[[], float],
        is_done: Callable[[Future[Any]], bool],
    ) -> None:
        """clock, is_done: see `Inputs`."""
        self._wake, self._clock, self._is_done = wake, clock, is_done
        self._waiting: list[SlowMask] = []
        self._running: list[SlowMask] = []
        self._stepped = 0.0
        self._until = 0.0
        self._share = LEAST_SECONDS
        self._spent = defaultdict[str, float](float)
        """Seconds of this step's masks, by client."""
        self._debts: dict[str, float] = {}
        """Seconds that clients have had beyond their parts of earlier steps."""

    def begin_step(self, clients: Collection[str]) -> None:
        """Divides the step's time among the clients that have rows in it."""
        now = self._clock()
        budget = min(max(SHARE * (now - self._stepped), LEAST_SECONDS), MOST_SECONDS)
        self._stepped, self._until = now, now + budget
        owed = {c: self._debts.get(c, 0.0) + self._spent[c] - self._share for c in self._spent}
        owed = {c: debt - self._share for c, debt in self._debts.items()} | owed
        self._debts = {client: debt for client, debt in owed.items() if debt > 0}
        self._share = budget / len(clients)
        self._spent.clear()

    def make(self, constraint: Constraint, token: int | None, bitmask: NDArray[np.uint32]) -> bool:
        """Makes a mask now. Returns False if every token may follow."""
        began = self._clock()
        restricts = constraint.step(token, bitmask)
        seconds = self._clock() - began
        constraint.history.add(seconds, self._share)
        self._spent[constraint.client] += seconds
        return restricts

    def fits(self, constraint: Constraint) -> bool:
        """Whether the row's mask is likely to be made within its client's part of the step."""
        history, client = constraint.history, constraint.client
        if not self.is_quick(constraint):
            return False
        if client in self._debts and history.quick <= TRUSTED:
            return False
        return self._spent[client] + history.seconds <= self._share

    def is_quick(self, constraint: Constraint) -> bool:
        """Whether the row's masks have taken little time, and no thread makes one for it."""
        return constraint.history.quick > 0 and not self._is_computed(constraint.lexer)

    def make_later(self, constraint: Constraint, token: int | None, words: int) -> SlowMask:
        """Makes a mask in a thread, as soon as the row's client has none there."""
        slow = SlowMask(constraint, token, np.empty(words, np.uint32), self._share)
        self._waiting.append(slow)
        self._begin()
        return slow

    def wait(self, masks: Sequence[SlowMask]) -> None:
        """Waits until the masks are made that may be within the step's time."""
        quick = [slow for slow in masks if slow.constraint.history.seconds <= slow.share]
        tasks = [slow.task for slow in quick if slow.task]
        if tasks and (left := self._until - self._clock()) > 0:
            wait(tasks, left)
        self.collect()

    def collect(self) -> None:
        """Notes which masks are made, and begins others in their place."""
        if not self._running:
            return
        now = self._clock()
        for slow in list(self._running):
            if slow.task and self._is_done(slow.task):
                self._running.remove(slow)
                slow.end()
                slow.constraint.history.add(now - slow.began, slow.share)
            elif not slow.is_made and now - slow.began > limits.GRAMMAR_TOKEN_SECONDS:
                slow.fail(TOO_SLOW)
        self._begin()

    def drop(self, constraint: Constraint) -> None:
        """Forgets a row that has left. A thread that computes its mask can't be stopped."""
        self._waiting = [slow for slow in self._waiting if slow.constraint is not constraint]

    @property
    def pause(self) -> float | None:
        """Seconds until a mask may take too long; None while none is made."""
        began = [slow.began for slow in self._running if not slow.is_made]
        if not began:
            return None
        return max(0.0, min(began) + limits.GRAMMAR_TOKEN_SECONDS - self._clock())

    def _begin(self) -> None:
        """Begins the waiting masks that may be made now, the quickest first."""
        for slow in sorted(self._waiting, key=lambda slow: slow.constraint.history.seconds):
            if len(self._running) >= limits.MASK_THREADS:
                return
            busy = {address_of(running.constraint.client) for running in self._running}
            is_busy = address_of(slow.constraint.client) in busy
            if not is_busy and not self._is_computed(slow.constraint.lexer):
                self._waiting.remove(slow)
                work = partial(_made, slow.constraint, slow.token, slow.bitmask)
                slow.began = self._clock()
                slow.task = in_thread(work, self._wake)
                self._running.append(slow)

    def _is_computed(self, lexer: object) -> bool:
        return any(slow.constraint.lexer is lexer for slow in self._running)


def _made(constraint: Constraint, token: int | None, bitmask: NDArray[np.uint32]) -> bool:
    yield_processor()
    return constraint.step(token, bitmask)


def in_thread(work: Callable[[], T], wake: Callable[[], None]) -> Future[T]:
    """Runs `work` in a daemon thread, which does not keep the process from exiting."""
    future: Future[T] = Future()
    future.add_done_callback(lambda _: wake())
    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=_run, args=(future, work), daemon=True).start()
    finally:
        threading.stack_size(before)
    return future


def _run(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # a panic in llguidance is not an Exception
        future.set_exception(error)
