"""Whose turn it is: clients, and tiers of requests, share by cost, in virtual time.

The pool orders waiting requests by it, and the engine the prompts that it computes.
"""

from collections.abc import Collection

from mlx_server import limits
from mlx_server.requests import Tier


class Programs:
    """Numbers the programs of one machine by the names that they give themselves.

    There are few numbers, so that a program that changes its name with each request gains little:
    a new name takes the number that was used longest ago.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        """The names in order of their last use."""

    def client(self, address: str, name: str) -> str:
        """The client that this program of the address is: see `address_of`."""
        number = self._numbers.pop(name, None)
        if number is None:
            number = len(self._numbers)
            if number == limits.PROGRAMS:
                number = self._numbers.pop(next(iter(self._numbers)))
        self._numbers[name] = number
        return f"{address} {number}"


def address_of(client: str) -> str:
    """What all programs of one address have in common; a key stands for itself."""
    return client.partition(" ")[0]


def of_tier(client: str, tier: Tier) -> str:
    """The client for its requests of a tier: those of another tier are like another program's."""
    return client if tier is Tier.DEFAULT else f"{client} {tier.name}"


class FairQueue:
    """Start-time fair queueing: each client has a virtual time, which its costs advance. The client
    whose time is the least is next, and a client that comes anew starts at the present one.

    Programs of one address that have had service lately pay for each other, so that together they
    get no more than one client.
    """

    def __init__(self) -> None:
        self.now = 0
        """The present virtual time, below which no client is."""
        self._times: dict[str, int] = {}

    def time(self, client: str) -> int:
        """The virtual time at which the client's next work starts."""
        return max(self.now, self._times.get(client, 0))

    def charge(self, client: str, cost: int) -> None:
        """Advances the client's time by the cost of work that it has or gets."""
        address, time = address_of(client), self.time(client)
        self._times[client] = time
        programs = sum(address_of(other) == address for other in self._times)
        self._times[client] = time + cost * programs

    def advance(self, now: int) -> None:
        """Moves the present on. Clients that it reaches are forgotten, and of the others those with
        the least times if there are too many."""
        self.now = max(self.now, now)
        ahead = sorted((time, client) for client, time in self._times.items() if time > self.now)
        self._times = {client: time for time, client in ahead[-limits.REMEMBERED_CLIENTS :]}


SHARE = 0.04
"""The time that a tier gets while a higher one has work, as a share of the higher one's."""


class TierTurns:
    """Whose tier the next operation serves: tiers share by weight in a fair queue.

    A lower tier has its turn once the higher one has had the time that pays for it, and for the
    operation that a new request of the higher one found running. No tier waits longer than a bound.
    """

    def __init__(self, longest_wait: float = float(limits.TIER_WAIT_SECONDS)) -> None:
        """longest_wait: that bound, in seconds."""
        self._longest_wait = longest_wait
        self._queue = FairQueue()
        self._present: dict[Tier, float] = {}
        """When the tiers that have work were served last, or got it."""
        self._cost: dict[tuple[Tier, bool], int] = {}
        """The virtual time that the next operation of a tier may take, by whether it is a piece."""

    def next(self, present: Collection[Tier], now: float, pieces: Collection[Tier] = ()) -> Tier:
        """present: the tiers that have work. pieces: those that go on with a piece of a prompt."""
        self._present = {tier: self._present.get(tier, now) for tier in present}
        self._queue.advance(min(map(self._time, present)))
        longest = min(present, key=lambda tier: self._present[tier])
        if now - self._present[longest] >= self._longest_wait:
            return longest

        def end(tier: Tier) -> int:
            return self._time(tier) + self._cost.get((tier, tier in pieces), 0)

        return min(present, key=lambda tier: (end(tier), tier))

    def took(self, tier: Tier, seconds: float, now: float, *, piece: bool = False) -> None:
        """Counts an operation of the tier, a piece of a prompt or another."""
        higher = sum(each < tier for each in self._present)
        higher += min(self._present, default=tier) > Tier.DEFAULT
        cost = int(1e6 * seconds / SHARE**higher)
        self._queue.charge(tier.name, cost)
        self._cost[tier, piece] = max(cost, self._cost.get((tier, piece), 0) * 7 // 8)
        if tier in self._present:
            self._present[tier] = now

    def _time(self, tier: Tier) -> int:
        return self._queue.time(tier.name)
