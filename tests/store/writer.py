"""A process that writes to a store until it is killed: a line on stdout for each write that was
acknowledged, and nothing else.
"""

import asyncio
import random
import sys
from pathlib import Path

from mlx_server.store import ItemRecord, Record, Store

OWNER = "me"


def stored(id: str, status: str) -> Record:
    """The same for the same arguments, small or large by the id's number."""
    size = (0, 100, 3_000, 40_000)[int(id.split("-")[1]) % 4]
    body = b'{"id":"%s","status":"%s"}' % (id.encode(), status.encode())
    output = ItemRecord(f"out-{id}", status.encode() * size)
    return Record("response", id, 0, body, status, output=(output,))


def given(id: str) -> list[ItemRecord]:
    return [ItemRecord(f"in-{id}", id.encode() * 50)]


def said(verb: str, id: str) -> None:
    sys.stdout.write(f"{verb} {id}\n")
    sys.stdout.flush()


async def write(path: Path, run: str) -> None:
    rng = random.Random(run)
    store = await Store.open(path)
    written: list[str] = []
    for number in range(1_000_000):
        id = f"{run}-{number}"
        await store.add(stored(id, "in_progress"), OWNER, given(id))
        said("begun", id)
        await store.put(stored(id, "completed"), OWNER, [b"e"] * 3)
        said("put", id)
        written.append(id)
        if rng.random() < 0.4:
            gone = written.pop(rng.randrange(len(written)))
            said("deleting", gone)  # from here on it may be gone
            await store.delete("response", gone, OWNER)
            said("deleted", gone)


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), sys.argv[2]))
