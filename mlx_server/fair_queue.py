"""Whose turn it is: clients share by cost, in virtual time.

The pool orders waiting requests by it, and the engine the prompts that it computes.
"""

from mlx_server import limits


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
