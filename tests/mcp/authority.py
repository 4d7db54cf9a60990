"""An MCP server that wants its users to log in, with its own authorization server, which lets
everybody in and rotates its refresh tokens."""

import base64
import hashlib
import json
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from tests.mcp.wild import JSON, Send, Wild, answered, quiet

Fields = dict[str, str]
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def visit(page: str) -> str:
    """What a browser does: it follows redirects, back to the login too."""
    with NO_PROXY.open(page, timeout=10) as response:
        return str(response.read().decode())


class Authority(Wild):
    def __init__(self) -> None:
        super().__init__(quiet)
        self.url = ""
        self.issuer = ""
        """Another authorization server that it names."""
        self.asked: list[Fields] = []
        """The fields of each request for a token."""
        self.credentials: list[str] = []
        """The client's, in the header of each such request."""
        self.registered: list[Any] = []
        self.pages: list[Fields] = []
        """The query of each page that an owner saw."""
        self.access: set[str] = set()
        self.refresh: set[str] = set()
        self.scope_needed: str | None = None
        self.page_of: Callable[[str], str] = lambda url: f"{url}/authorize"
        self.answer: Callable[[Fields], Fields] = lambda asked: {"code": "a-code"}
        self._challenge = ""

    @property
    def grants(self) -> Sequence[str]:
        return [each["grant_type"] for each in self.asked]

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        path = scope.get("path", "")
        heads = {name.decode(): value.decode() for name, value in scope.get("headers", ())}
        query = {k: v[0] for k, v in parse_qs(scope.get("query_string", b"").decode()).items()}
        token = heads.get("authorization", "").removeprefix("Bearer ")
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
        elif path == "/register":
            self.registered.append(json.loads((await receive())["body"]))
            await _json(send, 201, {**self.registered[-1], "client_id": "c"})
        elif path == "/authorize":
            self.pages.append(query)
            self._challenge = query["code_challenge"]
            back = {"state": query["state"], **self.answer(query)}
            location = f"{query['redirect_uri']}?{urlencode(back)}".encode()
            await answered(send, 302, b"", (b"location", location))
        elif path == "/token":
            self.credentials.append(heads.get("authorization", ""))
            body = parse_qs((await receive())["body"].decode())
            await self._token({name: values[0] for name, values in body.items()}, send)
        elif path.startswith("/.well-known/oauth-authorization-server"):
            await _json(send, 200, self._metadata())
        elif path.startswith("/.well-known/oauth-protected-resource"):
            found = {
                "resource": f"{self.url}/mcp",
                "authorization_servers": [self.issuer or self.url],
            }
            await _json(send, 200, found)
        elif token not in self.access:
            await answered(send, 401, b"", (b"www-authenticate", b'Bearer scope="read"'))
        elif self.scope_needed:
            challenge = f'Bearer error="insufficient_scope", scope="{self.scope_needed}"'
            await answered(send, 403, b"", (b"www-authenticate", challenge.encode()))
        else:
            await super().__call__(scope, receive, send)

    def _metadata(self) -> Any:
        return {
            "issuer": self.issuer or self.url,
            "authorization_endpoint": self.page_of(self.url),
            "token_endpoint": f"{self.url}/token",
            "registration_endpoint": f"{self.url}/register",
            "code_challenge_methods_supported": ["S256"],
        }

    async def _token(self, asked: Fields, send: Send) -> None:
        self.asked.append(asked)
        if not self._is_granted(asked):
            await _json(send, 400, {"error": "invalid_grant"})
            return
        number = len(self.asked)
        self.access, self.refresh = {f"access-{number}"}, {f"refresh-{number}"}
        granted = {"access_token": f"access-{number}", "refresh_token": f"refresh-{number}"}
        await _json(send, 200, {**granted, "token_type": "Bearer", "expires_in": 3600})

    def _is_granted(self, asked: Fields) -> bool:
        if asked["grant_type"] == "refresh_token":
            return asked["refresh_token"] in self.refresh
        if asked["grant_type"] == "client_credentials":
            return True
        digest = hashlib.sha256(asked["code_verifier"].encode()).digest()
        made = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        return (asked["code"], made) == ("a-code", self._challenge)


async def _json(send: Send, status: int, found: Any) -> None:
    await answered(send, status, json.dumps(found).encode(), JSON)


def callback_of(page: str) -> str:
    """Where a page sends its visitor back to."""
    return parse_qs(urlsplit(page).query)["redirect_uri"][0]
