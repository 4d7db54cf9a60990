"""`/v1/files` as OpenAI documents it and, for Anthropic's clients, as Anthropic does.

A file is written to disk while it arrives. Its name and type are its client's words, which are
shown and never used as a path.
"""

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import Annotated, BinaryIO, Literal, get_args

import msgspec
from fastapi import Query, Request, Response
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse

from mlx_server import limits
from mlx_server.api.accumulator import Wire
from mlx_server.api.fields import ignored_header
from mlx_server.api.file_inputs import disk_errors, find_file
from mlx_server.api.handlers import json_response
from mlx_server.api.stored import (
    After,
    Sorted,
    anthropic_page,
    newest,
    page_body,
    store_of,
)
from mlx_server.errors import BadRequest, NotFound, Overloaded, ServerError, StoreFull, TooLarge
from mlx_server.http.errors import is_anthropic
from mlx_server.http.middleware import FILES_PATH
from mlx_server.http.security import keyed_router
from mlx_server.store import Record, RecordFilter, Store
from mlx_server.system.shared_budget import ClientCounts

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
PURPOSES = get_args(Purpose)

LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 86400
"""What `expires_after` may be."""
DAY = 86400

PIECE_BYTES = 256 << 10
MEDIA_TYPE = re.compile(r"[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,60}(?:; ?charset=[a-z0-9-]{1,20})?", re.I)
UNKNOWN_TYPE = "application/octet-stream"


class UploadForm(MultiPartParser):
    """Writes the file where it stays, as it arrives."""

    def __init__(self, http: Request, content: BinaryIO, room: int) -> None:
        """room: the bytes that the file may have."""
        fields, nbytes = limits.UPLOAD_PARTS - 1, limits.UPLOAD_FIELD_BYTES
        stream = http.stream()
        super().__init__(http.headers, stream, max_files=1, max_fields=fields, max_part_size=nbytes)
        self.nbytes = 0
        self.is_complete = False
        self._content, self._room = content, room

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if file := self._current_part.file:
            file.file.close()  # a temporary one
            file.file = self._content

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        super().on_part_data(data, start, end)
        if self._current_part.file:
            self.nbytes += end - start
            if self.nbytes > self._room:
                raise _too_large(self._room)

    def on_end(self) -> None:
        self.is_complete = True


def _too_large(room: int) -> TooLarge | StoreFull:
    if room >= limits.FILE_BYTES:
        return TooLarge(f"The file is larger than {room} bytes, the limit on a file.", param="file")
    return StoreFull(
        f"There is room for {room} bytes more. Delete files (DELETE /v1/files/ID), or let them "
        "expire (`expires_after`)."
    )


def shown_name(name: str) -> str:
    """The last part of a client's path, without what a terminal or a page could obey."""
    last = re.split(r"[/\\]", name)[-1]
    printable = "".join(char for char in last if char.isprintable()).strip()
    shown = printable[: limits.FILE_NAME_CHARACTERS]
    return shown if shown.strip(".") else "file"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_file(
    store: Store,
    id: str,
    purpose: str,
    filename: str,
    nbytes: int,
    *,
    media_type: str = "application/jsonl",
    seconds: int | None = None,
) -> Record:
    """seconds: after which it expires; it is kept no longer than other records in any case."""
    created_at = int(time.time())
    most = int(store.retention.days * DAY)
    expires_at = created_at + min(most, seconds or most)
    body = {
        "id": id,
        "object": "file",
        "bytes": nbytes,
        "created_at": created_at,
        "expires_at": expires_at,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
        "mime_type": media_type,
    }
    labels = {"purpose": purpose, "bytes": nbytes, "expires_at": expires_at}
    listed = msgspec.json.encode(labels).decode()
    return Record("file", id, created_at, msgspec.json.encode(body), labels=listed)


def rfc3339(at: float | None) -> str | None:
    return None if at is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def anthropic_file(body: Wire) -> Wire:
    return {
        "id": body["id"],
        "type": "file",
        "filename": body["filename"],
        "mime_type": body["mime_type"],
        "size_bytes": body["bytes"],
        "created_at": rfc3339(body["created_at"]),
        "expires_at": rfc3339(body["expires_at"]),
        "downloadable": True,
    }


def wire_of(http: HTTPConnection, body: bytes) -> Wire:
    file = msgspec.json.decode(body, type=Wire)
    return anthropic_file(file) if is_anthropic(http.scope) else file


ONE = FILES_PATH + "/{id}"
CONTENT = ONE + "/content"

router = keyed_router()

_uploads = ClientCounts()


@router.post(FILES_PATH)
async def upload(http: Request) -> Response:
    store, owner = store_of(http), http.state.owner
    room = min(limits.FILE_BYTES, await store.file_room(owner))
    id = new_file_id()
    if _uploads.of(http.state.source) >= (most := limits.UPLOADS):
        raise Overloaded(f"{most} of your files arrive already. Try again when one has.")
    with ExitStack() as opened:
        opened.enter_context(_uploads.one_more(http.state.source))
        opened.enter_context(disk_errors())
        content = opened.enter_context(await asyncio.to_thread(store.contents.create, id))
        try:
            form = UploadForm(http, content, room)
            file, fields = await _received(form)
            await asyncio.to_thread(_to_disk, content)
            purpose, seconds = _options(fields, is_anthropic(http.scope))
        except BaseException:
            store.contents.remove([id])
            raise
        name, media_type = shown_name(file.filename or ""), file.content_type or ""
        media_type = media_type if MEDIA_TYPE.fullmatch(media_type) else UNKNOWN_TYPE
        about = new_file(
            store, id, purpose, name, form.nbytes, media_type=media_type, seconds=seconds
        )
        try:  # it is stored also if this is cancelled
            await store.add_file(about, owner, form.nbytes)
        except ServerError:
            store.contents.remove([id])
            raise
    ignored = [name[:64] for name in fields if name not in KNOWN_FIELDS]
    return json_response(wire_of(http, about.body), ignored_header(ignored))


KNOWN_FIELDS = (
    *("purpose", "expires_in_seconds", "expires_after[anchor]", "expires_after[seconds]"),
)


async def _received(form: UploadForm) -> tuple[UploadFile, dict[str, str]]:
    """The file and the other parts of the body."""
    kind, options = parse_options_header(form.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadRequest("Send the file as multipart/form-data, with `file` and `purpose`.")
    try:
        parts = await form.parse()
    except (MultiPartException, FormParserError) as error:
        what = error.message if isinstance(error, MultiPartException) else str(error)
        raise BadRequest(f"The body is not valid multipart/form-data: {what}") from None
    if not form.is_complete:
        raise BadRequest("The body is not valid multipart/form-data: its end is missing.")
    if len(parts) < len(parts.multi_items()):
        raise BadRequest("The body has a part twice.")
    if not isinstance(file := parts.get("file"), UploadFile):
        raise BadRequest("The part `file` is missing.", param="file")
    return file, {name: part for name, part in parts.items() if isinstance(part, str)}


def _to_disk(content: BinaryIO) -> None:
    content.flush()
    os.fsync(content.fileno())


def _options(fields: Mapping[str, str], for_anthropic: bool) -> tuple[str, int | None]:
    """The purpose, and after how many seconds the file expires if the client says so."""
    purpose = fields.get("purpose") or ("user_data" if for_anthropic else "")
    if purpose not in PURPOSES:
        raise BadRequest(f"`purpose` should be one of {', '.join(PURPOSES)}.", param="purpose")
    if fields.get("expires_after[anchor]") not in (None, "created_at"):
        raise BadRequest("`expires_after.anchor` should be `created_at`.", param="expires_after")
    seconds = fields.get("expires_after[seconds]") or fields.get("expires_in_seconds")
    return purpose, None if seconds is None else checked_seconds(seconds)


def checked_seconds(sent: str | int) -> int:
    seconds = int(sent) if re.fullmatch("[0-9]{1,9}", str(sent)) else 0
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise BadRequest(
            f"`expires_after.seconds` should be from {LEAST_SECONDS} to {MOST_SECONDS}.",
            param="expires_after",
        )
    return seconds


@router.get(FILES_PATH)
async def list_files(
    http: Request,
    purpose: str | None = None,
    after: After = None,
    limit: Annotated[int | None, Query(ge=1, le=limits.FILES)] = None,
    order: Sorted = "desc",
    page: After = None,
    after_id: After = None,
    before_id: After = None,
) -> Response:
    store, owner = store_of(http), http.state.owner
    selection = RecordFilter(purpose=purpose, expires_after=time.time())
    if is_anthropic(http.scope):
        after = page or after_id
        files = await newest(store, "file", owner, after, before_id, limit or 20, selection)
        return json_response(anthropic_page(files, lambda body: wire_of(http, body)))
    files = await store.records("file", owner, selection, after, limit or limits.FILES, order)
    return json_response(page_body(files))


@router.get(ONE)
async def retrieve_file(http: Request, id: str) -> Response:
    return json_response(wire_of(http, (await find_file(http, id)).body))


@router.get(CONTENT)
async def file_content(http: Request, id: str) -> Response:
    return await content_response(store_of(http), (await find_file(http, id)).id)


@router.delete(ONE)
async def delete_file(http: Request, id: str) -> Response:
    store = store_of(http)
    await store.delete("file", id, http.state.owner)
    await asyncio.to_thread(store.contents.remove, [id])
    if is_anthropic(http.scope):
        return json_response({"id": id, "type": "file_deleted"})
    return json_response({"id": id, "object": "file", "deleted": True})


async def content_response(store: Store, name: str, media_type: str = UNKNOWN_TYPE) -> Response:
    """The content as it is on disk. No page shows it as one of its own."""
    try:
        file = await asyncio.to_thread(store.contents.open, name)
    except FileNotFoundError:
        raise NotFound("The content of this file was deleted.") from None
    headers = {
        "content-length": str(os.fstat(file.fileno()).st_size),
        "content-disposition": "attachment",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(_pieces(file), headers=headers, media_type=media_type)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
