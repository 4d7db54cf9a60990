"""What is stored. Bodies are JSON that the store hands back as it came."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_server import limits

RUNNING = frozenset({"queued", "in_progress"})

KEPT = frozenset({"completed", "incomplete"})
"""How a response ends whose items become its conversation's."""


@dataclass(frozen=True, slots=True)
class ItemRecord:
    id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """`body` is a JSON object with the response's own `status`, and without its `output`."""

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
class Page:
    items: Sequence[ItemRecord]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Retention:
    """`count` holds for responses and for conversations, each; a conversation ages unused.

    Nothing is removed to stay below the two limits on bytes: what would pass them is refused.
    """

    days: float = 30
    count: int = 10_000
    bytes: int = limits.STORE_BYTES.value
    bytes_per_key: int = limits.STORE_BYTES_PER_KEY.value


@dataclass(frozen=True, slots=True)
class Stats:
    """`bytes` is what the files take on the disk, `stored` what counts towards the limits on bytes;
    `oldest` and `newest` are times of responses.
    """

    responses: int
    conversations: int
    items: int
    bytes: int
    stored: int
    oldest: float | None
    newest: float | None
