"""The actions that `Policy` returns, and the records that describe models to it and by it."""

from dataclasses import dataclass
from typing import Literal

Ticket = int
State = Literal["unloaded", "loading", "ready", "unloading"]


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model before it is loaded, from models.yaml and the files."""

    weights: int
    """The estimated bytes of its weights; 0 until its files have been read."""
    pinned: bool = False
    ttl: float | None = None
    """The seconds without a request after which it is unloaded; None: it stays."""


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
    """The ticket's rows must pause and free their memory until a `ResumeAction`."""

    ticket: Ticket


@dataclass(frozen=True)
class ResumeAction:
    ticket: Ticket


@dataclass(frozen=True)
class NeverFits:
    needed: int
    available: int
    """The bytes of the budget that other models, which must stay, do not occupy."""


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
    """The bytes of the model in memory, or an estimate until it has been loaded once."""
    last_used: float | None
    stale_at: float | None = None
    """The time at which it is unloaded if no request uses it before."""
