"""`/v1/files` as OpenAI documents it and, for Anthropic's clients, as Anthropic does.

A file is written to disk while it arrives. Its name and type are its client's words, which are
shown and never used as a path.
"""

import asyncio
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, Literal, get_args

import msgspec
from fastapi import Query, Request, Response
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse

from mlx_server import limits
from mlx_server.api.fields import ignored_header
from mlx_server.api.file_inputs import disk_errors, find_file
from mlx_server.api.handlers import json_response
from mlx_server.api.responses.create import page_body
from mlx_server.api.responses.routes import After, Sorted
from mlx_server.errors import BadRequest, NotFound, Overloaded, ServerError, StoreFull, TooLarge
from mlx_server.http.errors import is_anthropic
from mlx_server.http.middleware import FILES_PATH
from mlx_server.http.security import keyed_router
from mlx_server.store import ALL, Kind, Page, Record, RecordFilter, Store

Wire = dict[str, Any]
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
PURPOSES = get_args(Purpose)

LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 86400
"""What `expires_after` may be."""
DAY = 86400

PIECE_BYTES = 256 << 10
MEDIA_TYPE = re.compile(r"[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,60}(?:; ?charset=[a-z0-9-]{1,20})?", re.I)
UNKNOWN_TYPE = "application/octet-stream"


@dataclass
class Form:
    """The parts of a multipart body. That of the file is written to `content` as it arrives."""

    content: BinaryIO
    room: int
    """The bytes that the file may have."""
    fields: dict[str, bytes] = field(default_factory=dict)
    filename: str | None = None
    media_type: str = UNKNOWN_TYPE
    nbytes: int = 0
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _header: tuple[bytes, bytes] = (b"", b"")
    _parts: int = 0
    _name: str | None = None
    _pieces: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    def parser(self, content_type: str) -> MultipartParser:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise BadRequest("Send the file as multipart/form-data, with `file` and `purpose`.")
        return MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_end": self._on_end,
            },
        )

    @property
    def waiting(self) -> int:
        """The bytes of the file that have arrived and are not written yet."""
        return sum(map(len, self._pieces))

    def write(self, *, to_disk: bool = False) -> None:
        self.content.write(b"".join(self._pieces))
        self._pieces.clear()
        if to_disk:
            self.content.flush()
            os.fsync(self.content.fileno())

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        return None if value is None else value.decode(errors="replace")

    def _begin(self) -> None:
        self._headers, self._parts = {}, self._parts + 1
        if self._parts > (most := limits.UPLOAD_PARTS):
            raise BadRequest(f"The body has more than {most} parts.")

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], b"")

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _on_header(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = (b"", b"")

    def _on_headers(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"").decode("latin-1")
        _, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name == "file" and self.filename is None:
            self._name = None
            self.filename = shown_name(options.get(b"filename", b"").decode(errors="replace"))
            media_type = self._headers.get(b"content-type", b"").decode("latin-1")
            self.media_type = media_type if MEDIA_TYPE.fullmatch(media_type) else UNKNOWN_TYPE
        elif name in self.fields or name == "file":
            raise BadRequest(f"The body has the part `{name[:64]}` twice.", param=name[:64])
        else:
            self._name = name
            self.fields[name] = b""

    def _on_end(self) -> None:
        self.is_complete = True

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self._pieces.append(data[start:end])
            self.nbytes += end - start
            if self.nbytes > self.room:
                raise _too_large(self.room)
            return
        value = self.fields[self._name] + data[start:end]
        if len(value) > (most := limits.UPLOAD_FIELD_BYTES):
            raise BadRequest(f"A part other than `file` may have {most} bytes.")
        self.fields[self._name] = value


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
    kept = int(store.retention.days * DAY)
    expires_at = created_at + min(kept, seconds or kept)
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

_uploads: Counter[str] = Counter()
"""Of each client."""


@contextmanager
def _uploading(source: str) -> Iterator[None]:
    if _uploads[source] >= (most := limits.UPLOADS):
        raise Overloaded(f"{most} of your files arrive already. Try again when one has.")
    _uploads[source] += 1
    try:
        yield
    finally:
        _uploads.subtract({source: 1})
        if not _uploads[source]:
            del _uploads[source]


@router.post(FILES_PATH)
async def upload(http: Request) -> Response:
    store, owner = _store(http), http.state.owner
    room = min(limits.FILE_BYTES, await store.file_room(owner))
    id = new_file_id()
    with ExitStack() as opened:
        opened.enter_context(_uploading(http.state.source))
        opened.enter_context(disk_errors())
        content = opened.enter_context(await asyncio.to_thread(store.contents.create, id))
        form = Form(content, room)
        try:
            await _receive(http, form)
            purpose, seconds = _options(form, is_anthropic(http.scope))
        except BaseException:
            store.contents.remove([id])
            raise
        name, media_type = form.filename or "", form.media_type
        about = new_file(
            store, id, purpose, name, form.nbytes, media_type=media_type, seconds=seconds
        )
        try:  # it is stored also if this is cancelled
            await store.add_file(about, owner, form.nbytes)
        except ServerError:
            store.contents.remove([id])
            raise
    ignored = [name[:64] for name in form.fields if name not in KNOWN_FIELDS]
    return json_response(wire_of(http, about.body), ignored_header(ignored))


KNOWN_FIELDS = (
    *("purpose", "expires_in_seconds", "expires_after[anchor]", "expires_after[seconds]"),
)


async def _receive(http: Request, form: Form) -> None:
    try:
        parser = form.parser(http.headers.get("content-type", ""))
        async for chunk in http.stream():
            parser.write(chunk)
            if form.waiting >= PIECE_BYTES:
                await asyncio.to_thread(form.write)
    except FormParserError as error:
        raise BadRequest(f"The body is not valid multipart/form-data: {error}.") from None
    if not form.is_complete:
        raise BadRequest("The body is not valid multipart/form-data: its end is missing.")
    if form.filename is None:
        raise BadRequest("The part `file` is missing.", param="file")
    await asyncio.to_thread(form.write, to_disk=True)


def _options(form: Form, for_anthropic: bool) -> tuple[str, int | None]:
    """The purpose, and after how many seconds the file expires if the client says so."""
    purpose = form.text("purpose") or ("user_data" if for_anthropic else "")
    if purpose not in PURPOSES:
        raise BadRequest(f"`purpose` should be one of {', '.join(PURPOSES)}.", param="purpose")
    if form.text("expires_after[anchor]") not in (None, "created_at"):
        raise BadRequest("`expires_after.anchor` should be `created_at`.", param="expires_after")
    given = form.text("expires_after[seconds]") or form.text("expires_in_seconds")
    return purpose, None if given is None else checked_seconds(given)


def checked_seconds(given: str | int) -> int:
    seconds = int(given) if re.fullmatch("[0-9]{1,9}", str(given)) else 0
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
    store, owner = _store(http), http.state.owner
    wanted = RecordFilter(purpose=purpose, expires_after=time.time())
    if is_anthropic(http.scope):
        after = page or after_id
        files = await newest(store, "file", owner, after, before_id, limit or 20, wanted)
        return json_response(anthropic_page(files, lambda body: wire_of(http, body)))
    files = await store.records("file", owner, wanted, after, limit or limits.FILES, order)
    return json_response(page_body(files))


@router.get(ONE)
async def retrieve_file(http: Request, id: str) -> Response:
    return json_response(wire_of(http, (await find_file(http, id)).body))


@router.get(CONTENT)
async def file_content(http: Request, id: str) -> Response:
    return await content_response(_store(http), (await find_file(http, id)).id)


@router.delete(ONE)
async def delete_file(http: Request, id: str) -> Response:
    store = _store(http)
    await store.delete("file", id, http.state.owner)
    await asyncio.to_thread(store.contents.remove, [id])
    if is_anthropic(http.scope):
        return json_response({"id": id, "type": "file_deleted"})
    return json_response({"id": id, "object": "file", "deleted": True})


async def newest(
    store: Store,
    kind: Kind,
    owner: str,
    after: str | None,
    before: str | None,
    limit: int,
    wanted: RecordFilter = ALL,
) -> Page:
    """A page with the newest first, as Anthropic's clients ask for it."""
    if after and before:
        raise BadRequest("Send either `after_id` or `before_id`, not both.", param="after_id")
    if not before:
        return await store.records(kind, owner, wanted, after, limit, "desc")
    page = await store.records(kind, owner, wanted, before, limit, "asc")
    return Page(page.items[::-1], page.has_more)


def anthropic_page(page: Page, wire: Callable[[bytes], Wire]) -> Wire:
    items = page.items
    return {
        "data": [wire(item.body) for item in items],
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": page.has_more,
        "next_page": items[-1].id if page.has_more else None,
    }


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


def _store(http: Request) -> Store:
    store: Store = http.app.state.runs.store
    return store
