"""The uploaded files that a request names by `file_id`, and the pictures that it names by URLs of
hosts that the owner allows: they are had before the request is read, which then finds them."""

import asyncio
import base64
import codecs
import errno
import io
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from importlib import import_module
from itertools import chain
from typing import BinaryIO

import httpx2
import msgspec
from starlette.requests import HTTPConnection

from mlx_server import limits
from mlx_server.api.content import (
    SIGNATURES,
    UNKNOWN_TYPE,
    GivenFile,
    given_files,
    missing_pictures,
)
from mlx_server.api.stored import store_of
from mlx_server.errors import (
    BadRequest,
    NotFound,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    public_message,
)
from mlx_server.mcp.addresses import names_private_host
from mlx_server.mcp.limits import McpError
from mlx_server.request_threads import grow_request
from mlx_server.store import Record, Store

NAME = b'"file_id"'
FILE_ID = re.compile(rb'"file_id"\s{0,9}:\s{0,9}"(file-[0-9a-f]{24})"')
PICTURE_URL = re.compile(rb'url"\s{0,9}:\s{0,9}("https?:[^"]{1,2000}")', re.IGNORECASE)
PICTURE_MARKS = tuple(mark for mark, _ in SIGNATURES)


READ_BYTES = 1 << 20


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a JSONL file that are not blank, by their numbers, without a byte order mark.
    One that is too long comes cut."""
    reader = io.BufferedReader(file, READ_BYTES) if isinstance(file, io.RawIOBase) else file
    most = limits.BATCH_LINE_BYTES + len(b"\r\n")
    for number in itertools.count(1):
        line = rest = reader.readline(most)
        if not line:
            return
        while rest and not rest.endswith(b"\n"):
            rest = reader.readline(most)
        if (line := line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")).strip():
            yield number, line


async def give_files(connection: HTTPConnection, *texts: bytes) -> None:
    """Reads the files that these JSON texts name. One that is not there is left out: a history is
    not refused for it. Raises TooLarge: they count like bytes of the body."""
    if connection.app.state.picture_hosts:
        await _fetch_pictures(connection, texts)
    if not any(NAME in text for text in texts):
        return
    names = chain.from_iterable(FILE_ID.findall(text) for text in texts)
    ids = list(dict.fromkeys(id.decode() for id in names))
    if len(ids) > (most := limits.REQUEST_FILES):
        raise BadRequest(f"The request names {len(ids)} files; the limit is {most}.")
    room = connection.app.state.max_body_bytes - connection.state.body_bytes
    files = dict(given_files.get())
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
            data = await asyncio.to_thread(_base64, store_of(connection), id)
            files[id] = GivenFile(str(about["filename"]), str(about["mime_type"]), data)
    given_files.set(files)


async def _fetch_pictures(connection: HTTPConnection, texts: Sequence[bytes]) -> None:
    """One that can't be had is reported where its picture is refused."""
    hosts, private = connection.app.state.picture_hosts, connection.app.state.allow_private_urls
    quoted = chain.from_iterable(PICTURE_URL.findall(text) for text in texts)
    files, missing = dict(given_files.get()), dict(missing_pictures.get())
    new = (url for url in dict.fromkeys(map(_url, quoted)) if url not in files)
    urls = [url for url in new if _host(url) in hosts]
    room = connection.app.state.max_body_bytes - connection.state.body_bytes
    ends = time.monotonic() + limits.PICTURE_URL_SECONDS
    for url in urls[-limits.PICTURES :]:
        try:
            async with asyncio.timeout(ends - time.monotonic()):
                data = await _fetched(url, allow_private=private or names_private_host(url))
        except TimeoutError:
            missing[url] = f"did not come within {limits.PICTURE_URL_SECONDS} s"
        except (McpError, httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            missing[url] = f"can't be fetched: {error}"
        else:
            room -= len(data)
            if room < 0:
                missing[url] = "is larger, with the others, than `server.max_body_bytes`"
                continue
            grow_request(len(data))
            encoded = (await asyncio.to_thread(base64.b64encode, data)).decode()
            files[url] = GivenFile(url, UNKNOWN_TYPE, encoded)
            missing.pop(url, None)
    given_files.set(files)
    missing_pictures.set(missing)


def _url(quoted: bytes) -> str:
    try:
        return str(msgspec.json.decode(quoted))
    except ValueError:
        return ""


def _host(url: str) -> str:
    """The host, with its port unless it is that of the scheme; empty for a URL with a user name."""
    try:
        parts = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        return ""
    if parts.userinfo or parts.scheme not in ("http", "https"):
        return ""
    return parts.host if parts.port is None else f"{parts.host}:{parts.port}"


async def _fetched(url: str, *, allow_private: bool) -> bytes:
    """The bytes of a picture. No redirect is followed."""
    # imported when it is first needed, since the SDK takes most of a second to import
    http = await asyncio.to_thread(import_module, "mlx_server.mcp.http")
    transport = http.CheckedTransport(allow_private=allow_private)
    headers = {"accept": "image/*", "accept-encoding": "identity"}
    async with httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        answer = await client.get(url, headers=headers)
    if answer.status_code != HTTPStatus.OK:
        raise McpError(f"its server answered {answer.status_code}")
    if not answer.content.startswith(PICTURE_MARKS):
        raise McpError("what its server sent is no picture that is read")
    return answer.content


def _base64(store: Store, id: str) -> str:
    with store.contents.open(id) as file:
        return base64.b64encode(file.read()).decode()


async def find_file(connection: HTTPConnection, id: str) -> Record:
    """The record of a file of the client. Raises NotFound, also for one that has expired."""
    file = await store_of(connection).get("file", id, connection.state.owner)
    labels = msgspec.json.decode(file.labels or "{}", type=dict[str, object])
    if float(str(labels["expires_at"])) <= time.time():
        raise NotFound(f"File with id '{id}' has expired.")
    return file


async def find_file_for(connection: HTTPConnection, id: str, purpose: str, param: str) -> Record:
    """Raises BadRequest for one of another purpose. param: that names the file."""
    file = await find_file(connection, id)
    own_purpose = msgspec.json.decode(file.labels or "{}", type=dict[str, object])["purpose"]
    if own_purpose != purpose:
        raise BadRequest(
            f"The file has the purpose `{own_purpose}`; this one needs `{purpose}`.", param=param
        )
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
        why = f"The file can't be read or written: {public_message(error)}."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "The disk is full. Free some space on the disk of the data directory."
            raise StoreFull(why) from error
        raise StoreUnavailable(why) from error
