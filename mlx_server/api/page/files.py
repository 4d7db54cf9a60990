"""The files of the page. They hold no secret, so they need no key; their data does."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

PREFIX = "/page"
INDEX = "index.html"

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
"""Files of other kinds (licences, hashes) are not served."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a browser asks each time whether the ETag is still the same
    "vary": "Accept",
}


@dataclass(frozen=True)
class PageFile:
    path: str
    content: bytes
    media_type: str

    async def respond(self, http: Request) -> Response:
        etag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'
        headers = {**HEADERS, "etag": etag}
        if etag in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


class BrowserRoute(Route):
    """Matches the requests of browsers only: other clients ask `/` whether a server is there."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        accepted = b",".join(value for name, value in scope.get("headers", ()) if name == b"accept")
        return super().matches(scope) if b"text/html" in accepted else (Match.NONE, {})


def page_files() -> list[PageFile]:
    return list(_found(files(__package__).joinpath("static"), PREFIX))


def page_routes() -> list[Route]:
    others = {file.path: file for file in page_files()}
    index = others.pop(f"{PREFIX}/{INDEX}")
    return [BrowserRoute("/", index.respond), *(Route(p, f.respond) for p, f in others.items())]


def _found(folder: Traversable, path: str) -> list[PageFile]:
    pages: list[PageFile] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        at = f"{path}/{entry.name}"
        kind = MEDIA_TYPES.get(entry.name[entry.name.rfind(".") :])
        if entry.is_dir():
            pages += _found(entry, at)
        elif kind:
            pages.append(PageFile(at, entry.read_bytes(), kind))
    return pages
