"""A clock that a test sets."""

from dataclasses import dataclass


@dataclass
class Clock:
    now: float = 1000.0
    tick: float = 0.0
    """The seconds by which it goes on whenever it is read."""

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
