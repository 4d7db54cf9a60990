"""The Hugging Face hub, as much of it as a download uses, on loopback."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import urlsplit

from tests.sources.test_source import BODIES, BODY

COMMIT = "0123456789abcdef0123456789abcdef01234567"

STATUSES = {"broken": 500, "busy": 429, "private": 401}
"""By the names of repositories whose owner is org."""


class Hub(BaseHTTPRequestHandler):
    """A commit, its file list, the files."""

    files: ClassVar[list[str]] = []
    asked: ClassVar[list[str]] = []
    bodies: ClassVar[dict[str, bytes]] = {}
    """In place of those that files have by themselves."""
    sizes: ClassVar[dict[str, int]] = {}
    """That the list tells, where a file is not as large."""
    names: ClassVar[dict[str, str]] = {}
    """That the hub gives to contents, by file, where they differ from the file's own; and to the
    commit, under "sha" in the list and "commit" with each file."""
    cut_off: ClassVar[set[str]] = set()
    """Files of which the connection brings a half, once."""
    endless: ClassVar[set[str]] = set()
    """Files that are sent over and over, without a length."""
    next_page: ClassVar[str] = ""
    """The path of each list's next page, which is the same list again."""
    refused: ClassVar[int | None] = None
    """The status in place of any file, where it needs a token."""
    ranges: ClassVar[list[str]] = []
    revisions: ClassVar[tuple[str, ...]] = ("main", "v2")
    pauses: ClassVar[dict[str, str]] = {}
    """The headers that ask the client to wait."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.asked.append(path if self.command == "GET" else f"HEAD {path}")
        revision = path.removeprefix("/api/models/org/name/revision/")
        if revision in (*self.revisions, COMMIT):
            self.answer(
                json.dumps({"id": "org/name", "sha": self.names.get("sha", COMMIT)}).encode()
            )
        elif path.startswith("/api/models/org/name/revision/"):
            self.answer(b"", status=404, code="RevisionNotFound")
        elif path == "/api/models/org/name/refs":
            refs = [{"name": n, "ref": n, "targetCommit": COMMIT} for n in self.revisions]
            self.answer(json.dumps({"branches": refs, "tags": [], "converts": []}).encode())
        elif path == "/api/models":
            self.answer(json.dumps([{"id": "org/name"}, {"id": "org/other"}]).encode())
        elif path in (f"/api/models/org/name/tree/{COMMIT}", self.next_page):
            self.answer(json.dumps([self.listed(name) for name in self.files]).encode())
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self.send(path.rpartition("/")[2])
        elif status := STATUSES.get(path.split("/")[-3]):
            self.answer(b"", status=status)
        elif path.startswith("/api/models/org/gated/"):
            self.answer(b"", status=403, code="GatedRepo")
        else:
            self.answer(b"", status=404, code="RepoNotFound")

    do_HEAD = do_GET

    def listed(self, name: str) -> dict[str, Any]:
        size = self.sizes.get(name, len(self.body(name)))
        listed = {"type": "file", "path": name, "size": size, "oid": name}
        is_next = urlsplit(self.path).path == self.next_page
        if content := self.names.get("lfs on the next page" if is_next else "lfs"):
            listed["lfs"] = {"oid": content, "size": size, "pointerSize": 1}
        return listed

    def body(self, name: str) -> bytes:
        return self.bodies.get(name, BODIES.get(name, BODY))

    def send(self, name: str) -> None:
        body = self.body(name)
        if self.refused and self.headers["Authorization"] != "Bearer good":
            self.answer(b"", status=self.refused, code="GatedRepo" if self.refused == 403 else "")
        elif self.command == "GET" and name in self.cut_off:
            self.cut_off.remove(name)
            self.answer(body, etag=name, sent=len(body) // 2)
        elif (begins := self.headers["Range"]) and self.command == "GET":
            self.ranges.append(begins)
            start = int(begins.removeprefix("bytes=").partition("-")[0])
            self.answer(body[start:], 206, name, span=f"bytes {start}-{len(body) - 1}/{len(body)}")
        elif name in self.endless and self.command == "GET":
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            with suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 20))
        else:
            self.answer(body, etag=name)

    def answer(
        self,
        body: bytes,
        status: int = 200,
        etag: str = "-",
        code: str = "",
        span: str = "",
        sent: int | None = None,
    ) -> None:
        self.send_response(status)
        size = self.sizes.get(etag, len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(size))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{self.names.get(etag, etag)}"')
        self.send_header("X-Repo-Commit", self.names.get("commit", COMMIT))
        if self.next_page:
            self.send_header("Link", f'<http://{self.headers["Host"]}{self.next_page}>; rel="next"')
        for name, pause in self.pauses.items():
            self.send_header(name, pause)
        if code:
            self.send_header("X-Error-Code", code)
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:sent])
        self.close_connection = sent is not None

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving_hub() -> Iterator[ThreadingHTTPServer]:
    Hub.files, Hub.asked, Hub.ranges = [], [], []
    Hub.bodies, Hub.sizes, Hub.cut_off, Hub.refused = {}, {}, set(), None
    Hub.names, Hub.endless, Hub.next_page, Hub.pauses = {}, set(), "", {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
