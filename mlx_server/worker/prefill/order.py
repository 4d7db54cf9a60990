"""Decides whose prompt is computed next: clients take turns, shortest prompt first within a client.

Clients are served as in VTC ("Fairness in Serving Large Language Models", Sheng et al. 2024): the
client with the fewest computed prompt tokens is next, and a new client starts level with the lowest
active one. So a new client gets its turn at once from a client with many prompts, and its prompt is
then computed to its end. Within a client, the prompt with the fewest tokens left goes first; after
PASSED_OVER tokens of later prompts, the client's oldest prompt has a turn.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, Protocol, TypeVar

from mlx_server.limits import REMEMBERED_CLIENTS

TURN = 1024
"""Prompt tokens after which a client's turn is counted although its prompt continues."""

PASSED_OVER = 8192
"""Tokens of a client's later prompts that are computed before its oldest one has a turn."""

PASSED_OVER_SHARE = 4
"""The number of these tokens that one token of the oldest prompt cancels."""

SMALL = 2
"""A prompt with at most this many pieces left is finished before another client's turn."""


class ScheduledPrompt(Protocol):
    """A prompt that waits or is being computed."""

    @property
    def client(self) -> str: ...
    @property
    def number(self) -> int:
        """Numbers increase in order of arrival."""

    @property
    def left(self) -> int:
        """The number of tokens that are still to be computed."""


P = TypeVar("P", bound=ScheduledPrompt)


class PromptScheduler(Generic[P]):
    def __init__(self) -> None:
        self._waiting: list[P] = []
        """The waiting prompts, in order of arrival."""
        self._served: dict[str, int] = {}
        """Tokens computed for each client, without the uncounted ones of the present turn."""
        self._passed_over: dict[str, int] = {}
        """Tokens computed of each client's later prompts while its oldest one waits."""
        self._since: dict[str, int] = {}
        """The time at which each client arrived or had its latest turn: among equals, the earliest
        is next."""
        self._times = count()
        self._client: str | None = None
        """The client whose turn it is."""
        self._turn = 0
        """Tokens computed in this turn that are not counted in `_served` yet."""
        self._piece = 0
        """Tokens of the latest piece of this turn; 0 before the first piece."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[P]:
        return iter(self._waiting)

    def add(self, prompt: P) -> None:
        """Adds a new prompt, or one that another prompt has replaced."""
        active = {waiting.client for waiting in self._waiting}
        active |= set() if self._client is None else {self._client}
        if prompt.client not in active:
            self._enter(prompt.client, active)
        self._waiting.append(prompt)
        self._waiting.sort(key=lambda waiting: waiting.number)

    def _enter(self, client: str, active: set[str]) -> None:
        least = min((self._served[name] for name in active), default=0)
        # Former clients with fewer tokens than that would start at `least` anyway.
        gone = ((n, name) for name, n in self._served.items() if name not in active and n > least)
        kept = sorted(gone)[-REMEMBERED_CLIENTS:] if active else []
        self._served = {name: self._served[name] for name in active} | {n: s for s, n in kept}
        self._served[client] = max(self._served.get(client, 0), least)
        self._since = {name: self._since[name] for name in active}
        self._since[client] = next(self._times)
        self._passed_over = {n: t for n, t in self._passed_over.items() if n in active}

    def remove(self, prompt: P) -> None:
        self._waiting.remove(prompt)

    def begin(self, prompt: P) -> None:
        """Takes a prompt out of the queue and starts its client's turn."""
        self.end()
        self._waiting.remove(prompt)
        self._client = prompt.client

    def end(self) -> None:
        """Ends the turn, because its prompt is computed, was cancelled or is replaced."""
        self._count()
        if self._client is not None:
            self._since[self._client] = next(self._times)
        self._client = None
        self._piece = 0

    def computed(self, prompt: P, client: str, tokens: int) -> None:
        """Counts computed tokens. client: the prompt's own, or that of a row in the same pieces."""
        if client != self._client:  # the row shares the pieces of another client's prompt
            self._served[client] = self._served.get(client, 0) + tokens
            return
        self._turn += tokens
        self._piece = tokens
        if self._turn >= TURN:
            self._count()
        passed_over = self._passed_over.get(client, 0)
        if any(waiting.number < prompt.number for waiting in self._client_prompts(client)):
            passed_over += tokens
        else:
            passed_over = max(0, passed_over - PASSED_OVER_SHARE * tokens)
        self._passed_over[client] = passed_over

    def _count(self) -> None:
        if self._client is not None:
            self._served[self._client] += self._turn
        self._turn = 0

    def next(self, may_begin: Callable[[P], bool]) -> P | None:
        """Returns the next waiting prompt for which `may_begin` is true."""
        firsts = (self._first(client) for client in self._clients)
        return next((prompt for prompt in firsts if may_begin(prompt)), None)

    def instead_of(self, prompt: P, may_begin: Callable[[P], bool]) -> P | None:
        """Returns a waiting prompt that should replace the one being computed, if any."""
        if not self._piece:  # each turn computes at least one piece, however many prompts arrive
            return None
        return next((p for p in self._before(prompt) if may_begin(p)), None)

    def _before(self, prompt: P) -> Iterator[P]:
        for client in self._clients:
            first = self._first(client)
            before = self._is_shorter if client == prompt.client else self._has_had_less
            if before(first, prompt):
                yield first

    def _is_shorter(self, first: P, prompt: P) -> bool:
        """Whether `first` goes before another prompt of the same client, being much shorter."""
        is_passed_over = self._passed_over.get(prompt.client, 0) and prompt.number < first.number
        return not is_passed_over and first.left < prompt.left / 2

    def _has_had_less(self, first: P, prompt: P) -> bool:
        """Whether the client of `first` has had fewer tokens and has fewer left to compute."""
        return (
            self._served[first.client] <= self._served[prompt.client]
            and self._backlog(first.client) < self._backlog(prompt.client) + prompt.left
            and (prompt.left > SMALL * self._piece or first.left < prompt.left)
        )

    @property
    def _clients(self) -> list[str]:
        """The clients with waiting prompts, in the order in which they are served."""
        clients = dict.fromkeys(prompt.client for prompt in self._waiting)
        return sorted(clients, key=lambda client: (self._served[client], self._since[client]))

    def _client_prompts(self, client: str) -> list[P]:
        return [prompt for prompt in self._waiting if prompt.client == client]

    def _backlog(self, client: str) -> int:
        return sum(prompt.left for prompt in self._client_prompts(client))

    def _first(self, client: str) -> P:
        prompts = self._client_prompts(client)
        if self._passed_over.get(client, 0) >= PASSED_OVER:
            return prompts[0]
        return min(prompts, key=lambda prompt: prompt.left)
