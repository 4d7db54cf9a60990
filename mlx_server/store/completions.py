"""The store's operations on chat completions and on their request messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sqlite3 import Connection

from mlx_server.errors import BadRequest
from mlx_server.store import usage
from mlx_server.store.conversations import BEFORE_ALL, Order, add, drop, find, fitting_count, page
from mlx_server.store.database import Database, reads, sized, writes
from mlx_server.store.records import CompletionRecord, ItemRecord, Page

NEXT = {"asc": "seq > ?", "desc": "seq < ?"}
HAS_MODEL = " AND json_extract(labels, '$.model') = ?"
HAS_LABEL = (
    " AND EXISTS (SELECT 1 FROM json_each(labels, '$.metadata') AS label"
    " WHERE label.key = ? AND label.value = ?)"
)


@dataclass(frozen=True, slots=True)
class CompletionFilter:
    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def condition(self) -> tuple[str, list[str]]:
        """The filter as SQL to append to another condition, and the parameters of that SQL."""
        model = [] if self.model is None else [self.model]
        pairs = [text for pair in self.metadata.items() for text in pair]
        return HAS_MODEL * len(model) + HAS_LABEL * len(self.metadata), [*model, *pairs]


class Completions(Database):
    @writes
    def add_completion(
        self,
        db: Connection,
        completion: CompletionRecord,
        owner: str,
        messages: Sequence[ItemRecord] = (),
    ) -> None:
        labels, body = completion.labels.decode(), sized(completion.body)
        add(db, "completion", owner, completion, messages, labels=labels, body=body)
        usage.check(db, owner, self.retention)

    @reads
    def check_room(self, db: Connection, owner: str) -> None:
        """Raises StoreFull if the limits on bytes leave no room for the owner's next record."""
        usage.check(db, owner, self.retention)

    @reads
    def completion(self, db: Connection, id: str, owner: str) -> CompletionRecord:
        seq = find(db, "completion", id, owner)
        created_at, labels, body = db.execute(
            "SELECT created_at, labels, body FROM records WHERE seq = ?", (seq,)
        ).fetchone()
        return CompletionRecord(id, created_at, labels.encode(), body)

    @writes
    def update_completion(self, db: Connection, completion: CompletionRecord, owner: str) -> None:
        seq = find(db, "completion", completion.id, owner)
        row = (completion.labels.decode(), sized(completion.body), seq)
        db.execute("UPDATE records SET labels = ?, body = ? WHERE seq = ?", row)
        usage.check(db, owner, self.retention)

    @writes
    def delete_completion(self, db: Connection, id: str, owner: str) -> None:
        drop(db, "completion", id, owner)

    @reads
    def completions(
        self,
        db: Connection,
        owner: str,
        wanted: CompletionFilter,
        after: str | None = None,
        limit: int = 20,
        order: Order = "asc",
    ) -> Page:
        """A page of the completions that the filter selects, each as an item with its body."""
        start = BEFORE_ALL[order] if after is None else _position(db, after, owner)
        condition, parameters = wanted.condition()
        rows = db.execute(
            "SELECT seq, length(body) FROM records WHERE kind = 'completion' AND owner = ?"  # noqa: S608
            f" AND {NEXT[order]}{condition} ORDER BY seq {order} LIMIT ?",
            (owner, start, *parameters, limit + 1),
        ).fetchall()
        fitting = rows[: fitting_count([size for _, size in rows[:limit]])]
        found = (
            db.execute("SELECT id, body FROM records WHERE seq = ?", (seq,)).fetchone()
            for seq, _ in fitting
        )
        return Page([ItemRecord(*row) for row in found], has_more=len(rows) > len(fitting))

    @reads
    def completion_messages(
        self,
        db: Connection,
        id: str,
        owner: str,
        after: str | None = None,
        limit: int = 20,
        order: Order = "asc",
    ) -> Page:
        return page(db, find(db, "completion", id, owner), after, limit, order)


def _position(db: Connection, id: str, owner: str) -> int:
    found = db.execute(
        "SELECT seq FROM records WHERE kind = 'completion' AND id = ? AND owner = ?", (id, owner)
    ).fetchone()
    if found is None:
        raise BadRequest(
            f"`after` is '{id}', which is not a completion of this list. Use the `last_id` of a "
            "page.",
            param="after",
        )
    return int(found[0])
