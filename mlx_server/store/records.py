"""The records of the store. Their bodies are JSON bytes that the store returns unchanged."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_server import limits

RUNNING = frozenset({"queued", "in_progress"})

KEPT = frozenset({"completed", "incomplete"})
"""The final statuses of a response whose items are added to its conversation."""


@dataclass(frozen=True, slots=True)
class ItemRecord:
    id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response; `body` is its JSON object, with `status` but without `output`."""

    id: str
    created_at: float
    status: str
    body: bytes
    output: Sequence[ItemRecord] = ()
    previous: str | None = None
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    id: str
    created_at: float
    body: bytes


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """A chat completion; `labels` is the JSON object of what a list of them is filtered by: the
    `model` and the `metadata`."""

    id: str
    created_at: float
    labels: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Page:
    items: Sequence[ItemRecord]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept and for how long, counted separately for responses, conversations and chat
    completions.

    A response or a completion ages from its creation, a conversation from its last use. Nothing is
    removed to stay below the two limits on bytes: a write that would exceed them is refused.
    """

    days: float = 30
    count: int = 10_000
    bytes: int = limits.STORE_BYTES.value
    bytes_per_key: int = limits.STORE_BYTES_PER_KEY.value


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and sizes of the store.

    `bytes` is the size of the files on disk; `stored` counts towards the limits on bytes; `oldest`
    and `newest` are creation times of responses.
    """

    responses: int
    conversations: int
    completions: int
    items: int
    bytes: int
    stored: int
    oldest: float | None
    newest: float | None
