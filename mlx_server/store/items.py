"""Items in order, whether a response's or a conversation's."""

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import accumulate
from sqlite3 import Connection
from typing import Literal

from mlx_server import limits
from mlx_server.errors import BadRequest, NotFound, TooLarge
from mlx_server.store.database import sized
from mlx_server.store.records import ItemRecord, Page

Kind = Literal["response", "conversation"]
Order = Literal["asc", "desc"]

PAGES = {
    "asc": "SELECT seq, length(body) FROM items WHERE record = ? AND output = 0 AND seq > ?"
    " ORDER BY seq LIMIT ?",
    "desc": "SELECT seq, length(body) FROM items WHERE record = ? AND output = 0 AND seq < ?"
    " ORDER BY seq DESC LIMIT ?",
}
"""`length` of a blob reads none of it."""

BEFORE_ALL = {"asc": 0, "desc": 2**63 - 1}


def find(db: Connection, kind: Kind, id: str, owner: str) -> int:
    """Its `seq`. Another owner's is as unknown as one that never was."""
    found = db.execute(
        "SELECT seq FROM records WHERE kind = ? AND id = ? AND owner = ?", (kind, id, owner)
    ).fetchone()
    if found is None:
        raise NotFound(f"{kind.capitalize()} with id '{id}' not found.")
    return int(found[0])


def drop(db: Connection, kind: Kind, id: str, owner: str) -> None:
    db.execute("DELETE FROM records WHERE seq = ?", (find(db, kind, id, owner),))


def append(db: Connection, record: int, items: Iterable[ItemRecord], *, output: bool) -> None:
    for item in items:
        row = (record, output, item.id, sized(item.body))
        try:
            db.execute("INSERT INTO items (record, output, id, body) VALUES (?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            raise BadRequest(f"There is an item with id '{item.id}' already.") from error


def all_of(db: Connection, record: int) -> list[ItemRecord]:
    rows = db.execute("SELECT id, body FROM items WHERE record = ? ORDER BY output, seq", (record,))
    return [ItemRecord(*row) for row in rows]


def output_of(db: Connection, record: int) -> Sequence[ItemRecord]:
    rows = db.execute(
        "SELECT id, body FROM items WHERE record = ? AND output = 1 ORDER BY seq", (record,)
    )
    return tuple(ItemRecord(*row) for row in rows)


def page(db: Connection, record: int, after: str | None, limit: int, order: Order) -> Page:
    start = BEFORE_ALL[order] if after is None else _position(db, record, after)
    rows = db.execute(PAGES[order], (record, start, limit + 1)).fetchall()
    fitting = rows[: fitting_count([size for _, size in rows[:limit]])]
    items = [item_at(db, seq) for seq, _ in fitting]
    return Page(items, has_more=len(rows) > len(fitting))


def fitting_count(sizes: Sequence[int]) -> int:
    """How many of the first make a page: at least one, or nobody would get past a large one."""
    ends = accumulate(sizes)
    return max(1, sum(end <= limits.PAGE_BYTES.value for end in ends))


def item_at(db: Connection, seq: int) -> ItemRecord:
    return ItemRecord(*db.execute("SELECT id, body FROM items WHERE seq = ?", (seq,)).fetchone())


def size_at(db: Connection, seq: int) -> int:
    found = db.execute("SELECT length(body) FROM items WHERE seq = ?", (seq,)).fetchone()
    return int(found[0])


def check_count(db: Connection, conversation: int, more: int = 0) -> None:
    """Of a conversation that has got items, or is about to get more."""
    count = db.execute("SELECT count(*) FROM items WHERE record = ?", (conversation,)).fetchone()[0]
    if count + more > (most := limits.CONVERSATION_ITEMS.value):
        raise BadRequest(
            f"A conversation has at most {most} items. Delete some of them, or begin another.",
            param="conversation",
        )


class Measure:
    """Adds up what is to be read back before any of it is, and refuses what is too much."""

    def __init__(self, param: str, most_bytes: int) -> None:
        self._param, self._most_bytes = param, most_bytes
        self._bytes = self._items = 0

    def add(self, db: Connection, record: int) -> None:
        count, size = db.execute(
            "SELECT count(*), total(length(body)) FROM items WHERE record = ?", (record,)
        ).fetchone()
        self._items += count
        self._bytes += int(size)
        if self._bytes > self._most_bytes:
            raise too_much(self._param)
        if self._items > (most := limits.READ_BACK_ITEMS.value):
            raise TooLarge(
                f"`{self._param}` reads back more than {most} items. Begin anew, with what still "
                "matters in `input`.",
                param=self._param,
            )


def too_much(param: str) -> TooLarge:
    return TooLarge(
        f"What `{param}` reads back and this request are together over `server.max_body_bytes`. "
        "Begin anew, with what still matters in `input`, or raise it in models.yaml.",
        param=param,
    )


def _position(db: Connection, record: int, id: str) -> int:
    found = db.execute(
        "SELECT seq FROM items WHERE record = ? AND output = 0 AND id = ?", (record, id)
    ).fetchone()
    if found is None:
        raise BadRequest(f"There is no item '{id}' to go on after.", param="after")
    return int(found[0])
