"""The actions that `Policy` returns, and the records in which it describes models."""

from dataclasses import dataclass
from typing import Literal

Ticket = int
State = Literal["unloaded", "loading", "ready", "unloading"]


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model before it is loaded, from models.yaml and the files."""

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
    """The ticket's rows give their memory back and pause until a `ResumeAction`."""

    ticket: Ticket


@dataclass(frozen=True)
class ResumeAction:
    ticket: Ticket


@dataclass(frozen=True)
class NeverFits:
    needed: int
    available: int
    """Bytes of the budget that pinned models do not occupy."""


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
    """The memory state of one model."""

    state: State
    leases: int
    nbytes: int
    """This is an estimate until the model has been loaded once."""
    last_used: float | None
    stale_at: float | None = None
    """The time at which it is unloaded if no request comes before."""
