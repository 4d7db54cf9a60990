"""Files as the clients of OpenAI and Anthropic upload them, and as requests name them."""

import base64
import errno
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api import files
from mlx_server.config.settings import StoreSettings
from mlx_server.http.middleware import FILES_PATH
from mlx_server.store import contents
from tests.api import wire
from tests.api.wire import MODEL, ScriptedEngine, error, ok
from tests.store.make import limit

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x04\x00\x00\x00\x03"
KEYS = (wire.key("one-key"), wire.key("another-key"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def http(tiny_path: Path, engine: ScriptedEngine, folder: Path) -> Iterator[TestClient]:
    store = StoreSettings(data_dir=folder)
    with wire.client(tiny_path, engine, store, api_keys=KEYS) as client:
        yield client


def sdk(http: TestClient, key: str = "one-key") -> OpenAI:
    return OpenAI(base_url="http://localhost/v1", api_key=key, http_client=http, max_retries=0)


@pytest.fixture
def client(http: TestClient) -> OpenAI:
    return sdk(http)


def left(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / contents.FOLDER).glob("*"))


def test_a_file_from_upload_to_deletion(client: OpenAI, folder: Path) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 7200}
    file = client.files.create(
        file=("notes.txt", b"Salut"), purpose="user_data", expires_after=expiry
    )
    assert (file.object, file.bytes, file.filename) == ("file", 5, "notes.txt")
    assert (file.purpose, file.status) == ("user_data", "processed")
    assert file.expires_at == file.created_at + 7200
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == b"Salut"
    assert (folder / contents.FOLDER / file.id).stat().st_mode & 0o077 == 0
    assert client.files.delete(file.id).deleted
    assert file.id not in left(folder)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_pages_of_files(client: OpenAI) -> None:
    ids = [client.files.create(file=(f"{i}", b""), purpose="evals").id for i in range(5)]
    client.files.create(file=("other", b""), purpose="vision")
    page = client.files.list(purpose="evals", limit=2)
    assert [file.id for file in page.data] == ids[:-3:-1]
    assert page.has_more
    assert [file.id for file in page] == ids[::-1], "the client asks for all pages"
    assert [file.id for file in client.files.list(purpose="evals", order="asc")] == ids


def test_no_key_sees_the_files_of_another(http: TestClient, client: OpenAI) -> None:
    file = client.files.create(file=("mine.txt", b"x"), purpose="user_data")
    other = sdk(http, "another-key")
    assert file.id not in [each.id for each in other.files.list()]
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    part: Any = [{"type": "file", "file": {"file_id": file.id}}]
    for asking, seen in ((client, True), (other, False)):
        assert ask(asking, part) == ("" if seen else "messages.content.file")


def ask(client: OpenAI, parts: Any) -> str:
    """What the header says of the request's parts that have no effect."""
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, max_tokens=2, messages=[{"role": "user", "content": parts}]
    )
    return str(answer.headers.get("x-mlx-server-ignored", ""))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("..", "file"),
        ("/", "file"),
        ("a\x1b[31m\u202eb.txt", "a[31mb.txt"),
        ("x" * 2000, "x" * limits.FILE_NAME_CHARACTERS),
    ],
)
def test_a_name_is_shown_and_is_no_path(
    http: TestClient, client: OpenAI, folder: Path, name: str, shown: str
) -> None:
    before = sorted(folder.rglob("*"))
    boundary = "b"
    quoted = name.replace("\\", "\\\\")
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{quoted}"\r\n'
        f"Content-Type: text/html\r\n\r\n<script>\r\n--{boundary}--\r\n"
    )
    answer = post(http, body, f"multipart/form-data; boundary={boundary}")
    file = ok(answer)
    assert file["filename"] == shown
    new = set(folder.rglob("*")) - set(before)
    assert [path.name for path in new] == [file["id"]]
    content = client.files.content(file["id"])
    assert content.response.headers["content-type"] == files.UNKNOWN_TYPE
    assert content.response.headers["x-content-type-options"] == "nosniff"
    assert content.response.headers["content-disposition"] == "attachment"


def post(http: TestClient, body: str, kind: str, **headers: str) -> httpx2.Response:
    given = {"authorization": "Bearer one-key", "content-type": kind, **headers}
    return http.post(FILES_PATH, content=body.encode(), headers=given)


FORM = "multipart/form-data; boundary=b"


def part(name: str, value: str = "x", more: str = "") -> str:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'


PURPOSE = part("purpose", "batch")
FILE = part("file", "x", '; filename="f"')


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (f"{PURPOSE}--b--", FORM, "`file` is missing"),
        (f"{FILE}--b--", FORM, "`purpose` should be one of"),
        (f"{part('purpose', 'batch_output')}{FILE}--b--", FORM, "`purpose` should be one of"),
        (f"{FILE}{PURPOSE}{FILE}--b--", FORM, "Too many files"),
        (f"{PURPOSE}{FILE}{PURPOSE}--b--", FORM, "a part twice"),
        (f"{PURPOSE}{FILE}", FORM, "not valid multipart"),
        ("--b\r\nnothing like it", FORM, "not valid multipart"),
        ("", FORM, "not valid multipart"),
        ("{}", "application/json", "as multipart/form-data"),
        ("x", "multipart/form-data", "as multipart/form-data"),
        ("x", "multipart/form-data; boundary=" + "b" * 1000, "not valid multipart"),
        ("".join(part(f"f{i}") for i in range(99)) + "--b--", FORM, "number of fields is 15"),
        (f"{part('purpose', 'x' * 9999)}--b--", FORM, "maximum size of 4KB"),
        ("--b\r\n" + "A: b\r\n" * 999, FORM, "not valid multipart"),
        (f"--b\r\nA: {'b' * 99_999}\r\n", FORM, "not valid multipart"),
        (f"{part('expires_after[seconds]', '5')}{FILE}{PURPOSE}--b--", FORM, "3600"),
        (f"{part('expires_after[anchor]', 'x')}{FILE}{PURPOSE}--b--", FORM, "anchor"),
    ],
)  # fmt: skip
def test_bodies_that_bring_no_file(
    http: TestClient, folder: Path, body: str, kind: str, says: str
) -> None:
    before = left(folder)
    assert says in error(post(http, body, kind))["message"]
    assert left(folder) == before


def test_a_page_of_another_site_uploads_nothing(http: TestClient) -> None:
    body = f"{PURPOSE}{FILE}--b--"
    error(post(http, body, FORM, origin="https://evil.example"), 403)


def test_quotas(client: OpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = left(folder)
    limit(monkeypatch, "FILE_BYTES", 1000)
    with pytest.raises(openai.APIStatusError, match="limit on a file") as refused:
        client.files.create(file=("f", bytes(1001)), purpose="batch")
    assert refused.value.status_code == 413
    monkeypatch.undo()
    used = sum(file.bytes for file in client.files.list())
    limit(monkeypatch, "FILES_BYTES", 2 * (used + 500))
    with pytest.raises(openai.APIStatusError, match="room for 500 bytes more") as refused:
        client.files.create(file=("f", bytes(501)), purpose="batch")
    assert refused.value.status_code == 507
    fits = client.files.create(file=("f", bytes(500)), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="Delete files"):
        client.files.create(file=("f", b""), purpose="batch")
    client.files.delete(fits.id)
    monkeypatch.undo()
    limit(monkeypatch, "FILES", 2 * (len([*client.files.list()]) + 1))
    fits = client.files.create(file=("f", b"x"), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="There is no room") as refused:
        client.files.create(file=("f", b"x"), purpose="batch")
    assert refused.value.status_code == 507
    client.files.delete(fits.id)
    assert left(folder) == before


def test_a_full_disk_is_said_and_nothing_is_left(
    client: OpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = left(folder)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(openai.APIStatusError, match="The disk is full") as refused:
        client.files.create(file=("f", b"x"), purpose="batch")
    assert refused.value.status_code == 507
    assert left(folder) == before


def test_what_has_expired_is_gone(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("f", b"x"), purpose="batch", expires_after=expiry)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3601)
    assert file.id not in [each.id for each in client.files.list(purpose="batch")]
    for call in (client.files.retrieve, client.files.content):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_contents_without_a_record_are_removed(http: TestClient, folder: Path) -> None:
    """A server may end between a file's last byte and its record. One that is arriving stays."""
    store = http.app.state.runs.store  # type: ignore[attr-defined]
    before = left(folder)
    store.contents.create("file-abandoned").close()
    with store.contents.create("file-arriving"):
        assert http.portal
        http.portal.call(store.sweep)
        assert left(folder) == sorted([*before, "file-arriving"])
    http.portal.call(store.sweep)
    assert left(folder) == before


def test_an_upload_takes_no_memory(http: TestClient, folder: Path) -> None:
    size, chunk = 48 << 20, bytes(64 << 10)
    head = f"{part('purpose', 'vision')}".encode() + FILE.encode()[: -len("x\r\n")]
    sent = 0

    async def receive() -> dict[str, Any]:
        nonlocal sent
        sent += len(chunk)
        if sent > size:
            return {"type": "http.request", "body": b"\r\n--b--", "more_body": False}
        return {
            "type": "http.request",
            "body": head * (sent == len(chunk)) + chunk,
            "more_body": True,
        }

    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    headers = {"host": "localhost", "content-type": FORM, "authorization": "Bearer one-key"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": FILES_PATH,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "state": {},
    }
    assert http.portal
    tracemalloc.start()
    try:
        http.portal.call(http.app, scope, receive, send)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said[0]["status"] == 200
    file = json.loads(said[1]["body"])
    assert file["bytes"] == size == (folder / contents.FOLDER / file["id"]).stat().st_size
    assert peak < 4 << 20


def anthropic_of(http: TestClient) -> Anthropic:
    key = "one-key"
    return Anthropic(base_url="http://localhost", api_key=key, http_client=http, max_retries=0)


def test_files_in_anthropics_form(http: TestClient) -> None:
    client = anthropic_of(http)
    file = client.beta.files.upload(file=("notes.txt", b"Salut", "text/plain"))
    assert (file.filename, file.size_bytes, file.mime_type) == ("notes.txt", 5, "text/plain")
    second = client.beta.files.upload(file=("second.txt", b"", "text/plain"))
    page = client.beta.files.list(limit=1)
    assert [each.id for each in page.data] == [second.id]
    assert next(iter(page.get_next_page().data)).id == file.id
    before: Any = {"before_id": file.id}
    assert client.beta.files.list(extra_query=before, limit=1).data[0].id == second.id
    assert client.beta.files.retrieve_metadata(file.id) == file
    assert client.beta.files.download(file.id).read() == b"Salut"
    assert client.beta.files.delete(file.id).type == "file_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.beta.files.retrieve_metadata(file.id)


def test_requests_name_files_by_their_ids(
    http: TestClient, client: OpenAI, engine: ScriptedEngine
) -> None:
    """Each has the same prompt as with the file itself in its place."""
    text = client.files.create(file=("notes.txt", b"Salut!", "text/plain"), purpose="user_data").id
    picture = client.files.create(file=("p", PNG), purpose="vision").id
    data = f"data:text/plain;base64,{base64.b64encode(b'Salut!').decode()}"
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"

    def prompt() -> list[int]:
        return list(engine.taken[-1].prompt)

    def responses(*parts: Any) -> list[int]:
        answer = client.responses.create(
            model=MODEL, input=[{"role": "user", "content": list(parts)}], max_output_tokens=2
        )
        first = prompt()
        again = client.responses.create(
            model=MODEL, input="b", previous_response_id=answer.id, max_output_tokens=2
        )
        assert again.id
        return [*first, *prompt()]

    assert responses(
        {"type": "input_file", "file_id": text}, {"type": "input_image", "file_id": picture}
    ) == responses(
        {"type": "input_file", "file_data": data, "filename": "notes.txt"},
        {"type": "input_image", "image_url": url},
    )

    def chat(part: Any) -> list[int]:
        ask(client, [part])
        return prompt()

    assert chat({"type": "file", "file": {"file_id": text}}) == chat(
        {"type": "file", "file": {"file_data": data, "filename": "notes.txt"}}
    )

    def message(part: Any) -> list[int]:
        messages: Any = [{"role": "user", "content": [part]}]
        anthropic_of(http).beta.messages.create(model=MODEL, max_tokens=2, messages=messages)
        return prompt()

    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    assert message({"type": "image", "source": {"type": "file", "file_id": picture}}) == message(
        {"type": "image", "source": source}
    )
    assert b"Salut!".decode() in text_of(
        http, message({"type": "document", "source": {"type": "file", "file_id": text}})
    )


def text_of(http: TestClient, ids: list[int]) -> str:
    headers = {"authorization": "Bearer one-key"}
    body = {"model": MODEL, "tokens": ids}
    return str(ok(http.post("/detokenize", json=body, headers=headers))["prompt"])


def test_files_count_like_bytes_of_the_body(
    http: TestClient, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = client.files.create(file=("f", bytes(3000)), purpose="user_data").id
    monkeypatch.setattr(http.app.state, "max_body_bytes", 2000)  # type: ignore[attr-defined]
    with pytest.raises(openai.APIStatusError, match="max_body_bytes"):
        ask(client, [{"type": "file", "file": {"file_id": id}}])
    limit(monkeypatch, "REQUEST_FILES", 1)
    parts: Any = [{"type": "file", "file": {"file_id": f"file-{i:024x}"}} for i in range(2)]
    with pytest.raises(openai.BadRequestError, match="names 2 files"):
        ask(client, parts)
