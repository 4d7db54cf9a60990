"""The uploaded files that a request names by `file_id`: they are read before the request is, which
then finds them by their ids."""

import asyncio
import base64
import errno
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain

import msgspec
from starlette.requests import HTTPConnection

from mlx_server import limits
from mlx_server.api.content import GivenFile, given_files
from mlx_server.errors import (
    BadRequest,
    NotFound,
    ServerError,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    public_message,
)
from mlx_server.request_threads import grow_request
from mlx_server.store import Record, Store

NAME = b'"file_id"'
FILE_ID = re.compile(rb'"file_id"\s{0,9}:\s{0,9}"(file-[0-9a-f]{24})"')


async def give_files(connection: HTTPConnection, *texts: bytes) -> None:
    """Reads the files that these JSON texts name. One that is not there is left out: a history is
    not refused for it. Raises TooLarge: they count like bytes of the body."""
    if not any(NAME in text for text in texts):
        return
    found = chain.from_iterable(FILE_ID.findall(text) for text in texts)
    ids = list(dict.fromkeys(id.decode() for id in found))
    if len(ids) > (most := limits.REQUEST_FILES):
        raise BadRequest(f"The request names {len(ids)} files; the limit is {most}.")
    room = connection.app.state.max_body_bytes - connection.state.body_bytes
    given = dict(given_files.get())
    for id in ids:
        with suppress(NotFound, FileNotFoundError), disk_errors():
            file = await find_file(connection, id)
            about = msgspec.json.decode(file.body, type=dict[str, object])
            room -= (size := int(str(about["bytes"])))
            if room < 0:
                raise TooLarge(
                    "The files that this request names are larger than `server.max_body_bytes` "
                    "together with its body. Name fewer, or raise the limit in models.yaml."
                )
            grow_request(size)
            data = await asyncio.to_thread(_base64, connection.app.state.runs.store, id)
            given[id] = GivenFile(str(about["filename"]), str(about["mime_type"]), data)
    given_files.set(given)


def _base64(store: Store, id: str) -> str:
    with store.contents.open(id) as file:
        return base64.b64encode(file.read()).decode()


async def find_file(connection: HTTPConnection, id: str) -> Record:
    """The record of a file of the client. Raises NotFound, also for one that has expired."""
    store: Store = connection.app.state.runs.store
    file = await store.get("file", id, connection.state.owner)
    labels = msgspec.json.decode(file.labels or "{}", type=dict[str, object])
    if float(str(labels["expires_at"])) <= time.time():
        raise NotFound(f"File with id '{id}' has expired.")
    return file


@contextmanager
def disk_errors() -> Iterator[None]:
    """Makes an error of the disk one that the client can read; a file that is not there stays one
    that is not there."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise disk_error(error) from error


def disk_error(error: OSError) -> ServerError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("The disk is full. Free some space on the disk of the data directory.")
    return StoreUnavailable(f"The file can't be read or written: {public_message(error)}.")
