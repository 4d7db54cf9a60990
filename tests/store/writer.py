"""A server that writes to a store, and files to a folder of prompts, until it is killed. It tells
what was acknowledged, and nothing else.
"""

import asyncio
import random
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from mlx_server.prompt_files import BLOCK_TOKENS, PromptFile, PromptFolder, encoded, group_of, read
from mlx_server.store import ItemRecord, Record, Store

OWNER = "me"
GROUP = group_of("m")


def stored(id: str, status: str) -> Record:
    """The same for the same arguments, small or large by the id's number."""
    size = (0, 100, 3_000, 40_000)[int(id.split("-")[1]) % 4]
    body = b'{"id":"%s","status":"%s"}' % (id.encode(), status.encode())
    output = ItemRecord(f"out-{id}", status.encode() * size)
    return Record("response", id, 0, body, status, output=(output,))


def given(id: str) -> list[ItemRecord]:
    return [ItemRecord(f"in-{id}", id.encode() * 50)]


def prompt_file(id: str) -> PromptFile:
    """Servers write the same ones now and then."""
    return PromptFile(GROUP, group_of(id.split("-")[1]), BLOCK_TOKENS)


def opened(path: Path) -> PromptFolder:
    folder = PromptFolder(path.parent / "prompts", 1 << 30)
    folder.open()
    return folder


def check_file(folder: PromptFolder, file: PromptFile) -> None:
    _, ids = read(folder.place(file), file, 1 << 20)
    assert len(ids) == BLOCK_TOKENS


async def write(path: Path, run: str, acknowledged: Connection) -> None:
    rng = random.Random(run)
    store, folder = await Store.open(path), opened(path)
    ids = np.zeros(BLOCK_TOKENS, np.uint32)
    written: list[str] = []
    begun = f"{run}-0"
    await store.add(stored(begun, "in_progress"), OWNER, given(begun))
    acknowledged.send(("begun", begun))
    for number in range(1, 1_000_000):
        id = f"{run}-{number}"
        await store.add(stored(id, "in_progress"), OWNER, given(id))
        acknowledged.send(("begun", id))
        folder.write(prompt_file(id), [*encoded(prompt_file(id), ids, "m", {})])
        if prompt_file(id) in folder:  # else the other server is writing it, and may be killed
            check_file(folder, prompt_file(id))
            acknowledged.send(("file", id))
        await store.put(stored(id, "completed"), OWNER, [b"e"] * 3)
        acknowledged.send(("put", id))
        written.append(id)
        if rng.random() < 0.4:
            gone = written.pop(rng.randrange(len(written)))
            acknowledged.send(("deleting", gone))  # from here on it may be gone
            await store.delete("response", gone, OWNER)
            acknowledged.send(("deleted", gone))
        if number % 5 == 0:
            await store.adopt()  # as a server does when another one has ended
        assert (await store.get("response", begun, OWNER)).status == "in_progress"
        await asyncio.sleep(0.005)  # leaves the other server the file


def serve(path: Path, run: str, acknowledged: Connection) -> None:
    try:
        asyncio.run(write(path, run, acknowledged))
    except BaseException as error:
        acknowledged.send(("failed", repr(error)))
        raise
