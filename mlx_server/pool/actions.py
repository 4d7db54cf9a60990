"""What the policy wants done, and what it tells of models."""

from dataclasses import dataclass
from typing import Literal

Ticket = int
State = Literal["unloaded", "loading", "ready", "unloading"]


@dataclass(frozen=True)
class Facts:
    """What the owner and the files say of a model before it is loaded."""

    weights: int
    pinned: bool = False
    ttl: float | None = None


@dataclass(frozen=True)
class Load:
    model: str


@dataclass(frozen=True)
class Unload:
    model: str


@dataclass(frozen=True)
class ShrinkCache:
    to_bytes: int


@dataclass(frozen=True)
class Grant:
    ticket: Ticket


@dataclass(frozen=True)
class Preempt:
    """Its rows give their memory back, and wait for `Resume`."""

    ticket: Ticket


@dataclass(frozen=True)
class Resume:
    ticket: Ticket


@dataclass(frozen=True)
class NeverFits:
    needed: int
    available: int
    """The budget without the pinned models that stay in memory."""


@dataclass(frozen=True)
class WaitedTooLong:
    seconds: float


@dataclass(frozen=True)
class LoadFailed:
    model: str


Reason = NeverFits | WaitedTooLong | LoadFailed


@dataclass(frozen=True)
class Refuse:
    ticket: Ticket
    reason: Reason


Action = Load | Unload | ShrinkCache | Grant | Preempt | Resume | Refuse
Actions = tuple[Action, ...]


@dataclass(frozen=True)
class View:
    """A model as its owner sees it."""

    state: State
    leases: int
    nbytes: int
    """An estimate until it has been loaded once."""
    last_used: float | None
