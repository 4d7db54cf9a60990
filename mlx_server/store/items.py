"""Items in order, whether a response's or a conversation's."""

import sqlite3
from collections.abc import Iterable, Sequence
from sqlite3 import Connection
from typing import Literal

from mlx_server.errors import BadRequest, NotFound
from mlx_server.store.database import sized
from mlx_server.store.records import Item, Page

Kind = Literal["response", "conversation"]
Order = Literal["asc", "desc"]

PAGES = {
    "asc": "SELECT id, body FROM items WHERE record = ? AND output = 0 AND seq > ?"
    " ORDER BY seq LIMIT ?",
    "desc": "SELECT id, body FROM items WHERE record = ? AND output = 0 AND seq < ?"
    " ORDER BY seq DESC LIMIT ?",
}

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


def append(db: Connection, record: int, items: Iterable[Item], *, output: bool) -> None:
    for item in items:
        row = (record, output, item.id, sized(item.body))
        try:
            db.execute("INSERT INTO items (record, output, id, body) VALUES (?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            raise BadRequest(f"There is an item with id '{item.id}' already.") from error


def all_of(db: Connection, record: int) -> list[Item]:
    rows = db.execute("SELECT id, body FROM items WHERE record = ? ORDER BY output, seq", (record,))
    return [Item(*row) for row in rows]


def output_of(db: Connection, record: int) -> Sequence[Item]:
    rows = db.execute(
        "SELECT id, body FROM items WHERE record = ? AND output = 1 ORDER BY seq", (record,)
    )
    return tuple(Item(*row) for row in rows)


def page(db: Connection, record: int, after: str | None, limit: int, order: Order) -> Page:
    start = BEFORE_ALL[order] if after is None else _position(db, record, after)
    rows = db.execute(PAGES[order], (record, start, limit + 1)).fetchall()
    return Page([Item(*row) for row in rows[:limit]], has_more=len(rows) > limit)


def _position(db: Connection, record: int, id: str) -> int:
    found = db.execute(
        "SELECT seq FROM items WHERE record = ? AND output = 0 AND id = ?", (record, id)
    ).fetchone()
    if found is None:
        raise BadRequest(f"There is no item '{id}' to go on after.", param="after")
    return int(found[0])
