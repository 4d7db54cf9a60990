"""What the policy wants done, and what it tells of models."""

from dataclasses import dataclass
from typing import Literal

Ticket = int
State = Literal["unloaded", "loading", "ready", "unloading"]


@dataclass(frozen=True)
class ModelFacts:
    """What the owner and the files say of a model before it is loaded."""

    weights: int
    pinned: bool = False
    ttl: float | None = None


@dataclass(frozen=True)
class LoadAction:
    model: str


@dataclass(frozen=True)
class UnloadAction:
    model: str


@dataclass(frozen=True)
class ShrinkCache:
    to_bytes: int


@dataclass(frozen=True)
class Grant:
    ticket: Ticket


@dataclass(frozen=True)
class PreemptAction:
    """Its rows give their memory back, and wait for `Resume`."""

    ticket: Ticket


@dataclass(frozen=True)
class ResumeAction:
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
class FailedToLoad:
    model: str


Reason = NeverFits | WaitedTooLong | FailedToLoad


@dataclass(frozen=True)
class Refuse:
    ticket: Ticket
    reason: Reason


Action = LoadAction | UnloadAction | ShrinkCache | Grant | PreemptAction | ResumeAction | Refuse
Actions = tuple[Action, ...]


@dataclass(frozen=True)
class PolicyView:
    """A model as its owner sees it."""

    state: State
    leases: int
    nbytes: int
    """An estimate until it has been loaded once."""
    last_used: float | None
