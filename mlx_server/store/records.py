"""The records of the store. Their bodies are JSON, which the store returns unchanged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mlx_server import limits

BatchKind = Literal["batch", "message batch"]
JobKind = BatchKind | Literal["fine-tuning job"]
Kind = Literal["response", "conversation", "completion", "page conversation", "file"] | JobKind
KINDS: tuple[Kind, ...] = (
    *("response", "conversation", "completion", "page conversation", "file"),
    *("batch", "message batch", "fine-tuning job"),
)
Order = Literal["asc", "desc"]

RUNNING = frozenset({"queued", "in_progress"})

CONVERSATION_STATUSES = frozenset({"completed", "incomplete"})
"""The final statuses of responses whose items are added to their conversation."""


@dataclass(frozen=True, slots=True)
class ItemRecord:
    id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A response, a conversation (of the API or of the page), a chat completion, a file or a batch,
    without its input items. The fields after `body` are a response's, but for the `labels` and the
    `status`, which a batch has too."""

    kind: Kind
    id: str
    created_at: float
    body: bytes
    """A JSON object. A response's has its `status`, and not its `output`."""
    status: str = ""
    previous: str | None = None
    conversation: str | None = None
    labels: str | None = None
    """A JSON object: of a chat completion the fields by which it is listed, `model` and `metadata`;
    of a conversation of the page what is listed of it; of a file its `purpose`, `bytes` and
    `expires_at`; of a batch the `contents` that it has."""
    output: Sequence[ItemRecord] = ()


class RunNews(NamedTuple):
    """What is new of a response that runs in the background."""

    id: str
    owner: str
    status: str
    first: int
    """The number of the first of these events."""
    events: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Page:
    items: Sequence[ItemRecord]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Retention:
    """How many records are kept and for how long.

    Responses, conversations and chat completions are counted separately. The age of a conversation
    is the time since its last use, that of other records the time since their creation. Nothing is
    removed to stay within the limit on bytes: a write that would exceed them is refused.
    """

    days: float = 30
    bytes: int = limits.STORE_BYTES
    """The most bytes of all owners together. One may have half of them."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The counts and sizes of the store.

    `bytes` is the size of the files on disk, `stored` the bytes that count towards the limits;
    `oldest` and `newest` are creation times of responses, as Unix times.
    """

    responses: int
    conversations: int
    completions: int
    items: int
    bytes: int
    stored: int
    oldest: float | None
    newest: float | None
