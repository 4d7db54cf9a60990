"""Whose prompt is computed next: clients take turns, and each client's shortest prompt goes first.

Clients are served as in VTC ("Fairness in Serving Large Language Models", Sheng et al. 2024): the
one that had the fewest prompt tokens computed goes next, and one that comes anew starts level with
the one that had least. So a newcomer takes its turn from a client with many prompts at once, and
its own prompt is then computed to its end. Of one client, the prompt with the fewest tokens left
goes first; while it does, older ones are passed over, and after so many tokens of that the oldest
has a turn.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, Protocol, TypeVar

from mlx_server.limits import REMEMBERED_CLIENTS

TURN = 4096
"""Tokens of prompt after which a client's turn is counted, though its prompt goes on."""

PASSED_OVER = 8192
"""Tokens of later prompts of the same client that are computed before its oldest one has a turn."""

PASSED_OVER_SHARE = 4
"""So many of them count as made up for by one token of the oldest."""

SMALL = 2
"""Pieces: so little is left of a prompt that it is finished before another client's turn."""


class ScheduledPrompt(Protocol):
    """One that waits, or is being computed."""

    @property
    def client(self) -> str: ...
    @property
    def number(self) -> int:
        """In order of arrival."""

    @property
    def left(self) -> int:
        """Tokens to be computed."""


P = TypeVar("P", bound=ScheduledPrompt)


class PromptScheduler(Generic[P]):
    def __init__(self) -> None:
        self._waiting: list[P] = []
        """In order of arrival."""
        self._served: dict[str, int] = {}
        """Tokens computed for each client, those of the present turn not yet counted."""
        self._passed_over: dict[str, int] = {}
        self._since: dict[str, int] = {}
        """When each client came, or had its last turn: of equals, the one that waits longest."""
        self._times = count()
        self._client: str | None = None
        """Whose turn it is."""
        self._turn = 0
        """Tokens computed in this turn, as far as they are not counted."""
        self._piece = 0
        """Tokens of the latest piece of this turn; 0 before the first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[P]:
        return iter(self._waiting)

    def add(self, prompt: P) -> None:
        """One that comes, or that another one took the place of."""
        active = {waiting.client for waiting in self._waiting}
        active |= set() if self._client is None else {self._client}
        if prompt.client not in active:
            self._enter(prompt.client, active)
        self._waiting.append(prompt)
        self._waiting.sort(key=lambda waiting: waiting.number)

    def _enter(self, client: str, active: set[str]) -> None:
        least = min((self._served[name] for name in active), default=0)
        # Clients that have gone with less than that would come back level with the others anyway.
        gone = ((n, name) for name, n in self._served.items() if name not in active and n > least)
        kept = sorted(gone)[-REMEMBERED_CLIENTS.value :] if active else []
        self._served = {name: self._served[name] for name in active} | {n: s for s, n in kept}
        self._served[client] = max(self._served.get(client, 0), least)
        self._since = {name: self._since[name] for name in active}
        self._since[client] = next(self._times)
        self._passed_over = {n: t for n, t in self._passed_over.items() if n in active}

    def remove(self, prompt: P) -> None:
        self._waiting.remove(prompt)

    def begin(self, prompt: P) -> None:
        """It leaves the queue; its client has a turn."""
        self.end()
        self._waiting.remove(prompt)
        self._client = prompt.client

    def end(self) -> None:
        """Of the turn, and of the prompt that was computed in it, or of its stay in front."""
        self._count()
        if self._client is not None:
            self._since[self._client] = next(self._times)
        self._client = None
        self._piece = 0

    def computed(self, prompt: P, client: str, tokens: int) -> None:
        """client: of a row that shares the prompt's pieces, or the prompt's own."""
        if client != self._client:  # its row shares the pieces of another client's prompt
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
        """Of those that wait."""
        firsts = (self._first(client) for client in self._clients)
        return next((prompt for prompt in firsts if may_begin(prompt)), None)

    def instead_of(self, prompt: P, may_begin: Callable[[P], bool]) -> P | None:
        """One that takes the place of a prompt which is being computed."""
        if not self._piece:  # it gets on, however many come
            return None
        return next((p for p in self._before(prompt) if may_begin(p)), None)

    def _before(self, prompt: P) -> Iterator[P]:
        for client in self._clients:
            first = self._first(client)
            before = self._is_shorter if client == prompt.client else self._has_had_less
            if before(first, prompt):
                yield first

    def _is_shorter(self, first: P, prompt: P) -> bool:
        """Both of one client."""
        is_passed_over = self._passed_over.get(prompt.client, 0) and prompt.number < first.number
        return not is_passed_over and first.left < prompt.left / 2

    def _has_had_less(self, first: P, prompt: P) -> bool:
        """The client of the first, and it does not ask for more."""
        return (
            self._served[first.client] <= self._served[prompt.client]
            and self._backlog(first.client) < self._backlog(prompt.client) + prompt.left
            and (prompt.left > SMALL * self._piece or first.left < prompt.left)
        )

    @property
    def _clients(self) -> list[str]:
        """Those with prompts that wait, in the order in which they are served."""
        clients = dict.fromkeys(prompt.client for prompt in self._waiting)
        return sorted(clients, key=lambda client: (self._served[client], self._since[client]))

    def _client_prompts(self, client: str) -> list[P]:
        return [prompt for prompt in self._waiting if prompt.client == client]

    def _backlog(self, client: str) -> int:
        return sum(prompt.left for prompt in self._client_prompts(client))

    def _first(self, client: str) -> P:
        mine = self._client_prompts(client)
        if self._passed_over.get(client, 0) >= PASSED_OVER:
            return mine[0]
        return min(mine, key=lambda prompt: prompt.left)
