"""Checks requests before the app sees them: Host, Origin, body headers and API keys; signs and
seals what clients keep for the server.

Any web page can make the browser on this machine send requests to a local server. Such a request
has a foreign Host (DNS rebinding) or a foreign Origin.
"""

import base64
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from fastapi import APIRouter, Depends
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server import limits
from mlx_server.errors import (
    BadRequest,
    Forbidden,
    ServerError,
    SettingsError,
    TooLarge,
    Unauthorized,
    UnsupportedMediaType,
)
from mlx_server.fair_queue import Programs
from mlx_server.http.admission import source_of
from mlx_server.http.errors import error_response, is_anthropic
from mlx_server.http.middleware import StampedSend, is_upload
from mlx_server.http.strict_json import quoted
from mlx_server.messages import INSTRUCTION_ROLES, Conversation
from mlx_server.prompts.message_normalization import BILLING
from mlx_server.request_threads import client_of_request
from mlx_server.requests import DETERMINISTIC_HEADER, HOPS_HEADER, GenerateRequest, Tier
from mlx_server.system.files import open_regular, own_path, write_private
from mlx_server.system.listening_sockets import is_loopback
from mlx_server.system.logs import RequestLogContext, request_context

SIGNED, SEALED = "mlx1.", "mlx3."
"""Beginnings of a signature of a thought, and of a sealed text."""


class Signer:
    def __init__(self, key: bytes) -> None:
        self._key = key
        # the same text has the same seal, in each event of a stream that shows it
        self._cipher = AESSIV(hmac.digest(key, SEALED.encode(), hashlib.sha512))

    def of(self, owner: str) -> "Signer":
        """The signer for one API key: what it seals can be opened with this key only.

        owner: made from the key; empty without keys, where all clients share one signer.
        """
        return Signer(hmac.digest(self._key, b"owner:" + owner.encode(), hashlib.sha256))

    def sign(self, thought: str) -> str:
        return SIGNED + _encoded(self._mac(_bytes(thought)))

    def seal(self, text: str) -> str:
        """Encrypts a thought or a summary, for the client to send back."""
        return SEALED + _encoded(self._cipher.encrypt(_bytes(text), None))

    def is_own(self, thought: str, signature: str) -> bool:
        """Whether the thought was written for this API key and is unchanged."""
        if signature.startswith(SEALED):
            return self.opened(signature) == thought
        raw = _decoded(signature, SIGNED)
        return raw is not None and hmac.compare_digest(raw, self._mac(_bytes(thought)))

    def opened(self, sealed: str) -> str | None:
        """Decrypts a text of `seal`; None if it was not made for this API key."""
        raw = _decoded(sealed, SEALED)
        if raw is None:
            return None
        try:
            return self._cipher.decrypt(raw, None).decode()
        except (InvalidTag, ValueError):  # ValueError: too short for a tag
            return None

    def _mac(self, raw: bytes) -> bytes:
        return hmac.digest(self._key, raw, hashlib.sha256)


def _bytes(thought: str) -> bytes:
    return thought.encode(errors="replace")


def _encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _decoded(signature: str, kind: str) -> bytes | None:
    if not signature.startswith(kind):
        return None
    try:
        return base64.b64decode(signature.removeprefix(kind), validate=True)
    except ValueError:
        return None


METHODS = "GET, POST, DELETE, OPTIONS"

METHODS_WITH_BODY = {"POST", "PUT", "PATCH"}

UPLOAD_FORM_BYTES = 64 << 10
"""What a body that uploads a file may have besides."""

EXPOSED = "x-request-id, x-mlx-server-ignored, x-mlx-server-stream, retry-after"

OWN_SITES = {"same-origin", "none"}

PREFLIGHT_SECONDS = "600"

POLICY_VIOLATION = 1008

THIS_MACHINE = "127.0.0.1"

CLIENT_HEADER = "x-mlx-server-client"
"""The name that a program gives itself, if its user agent is also that of others."""

DEFAULT_PORTS = {"http": "80", "https": "443"}

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)(?::[0-9]{1,5})?")

ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/\s:*@?#]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")

TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

REQUEST_ID = re.compile(rf"[ -~]{{1,{limits.REQUEST_ID_CHARACTERS}}}")

# int() refuses more than 4300 digits
HOPS = re.compile(r"[0-9]{1,3}")

LENGTH = re.compile(r"[0-9]{1,4000}")

UNTYPED: tuple[list[str], ...] = (
    [],
    ["application/octet-stream"],
    ["application/x-www-form-urlencoded"],
)
"""Content types of a body to which the client gave none: aiohttp sends the second one, curl the
third."""

CONTAINER_HOSTS = (".docker.internal", ".containers.internal")
"""Ends of the names that containers have for this machine. No public DNS server answers for
`.internal`."""


class SecurityMiddleware:
    """Outer ASGI middleware: a request that it refuses never reaches the app.

    It sets `request_id` in the request's state, and `response_headers` for responses that do not
    pass through it. A `*` in `allowed_origins` allows every page; `allowed_hosts` has no wildcard.
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: Collection[str],
        allowed_origins: Collection[str],
        max_body_bytes: int,
        bound_host: str,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        bound = _configured_name(bound_host)
        self._hosts = {bound} | {_allowed_host(host) for host in allowed_hosts}
        # DNS rebinding needs a name, so a Host that is an address is safe.
        self._any_address = bound is None or not is_loopback(bound)
        self._any_origin = "*" in allowed_origins
        self._origins = {_allowed_origin(origin) for origin in allowed_origins if origin != "*"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        stamp = {"x-request-id": _request_id(headers)}
        if is_anthropic(scope):
            stamp["request-id"] = stamp["x-request-id"]
        state = scope.setdefault("state", {})
        state.update(request_id=stamp["x-request-id"], response_headers=stamp)
        request_context.set(RequestLogContext(stamp["x-request-id"]))
        reply = StampedSend(send, stamp)
        try:
            self._check_host(headers)
            stamp.update(self._check_origin(scope, headers))
            if _is_preflight(scope, headers) and "access-control-allow-origin" in stamp:
                await _preflight(headers)(scope, receive, reply)
                return
            most, setting = self._max_body_bytes, "the limit `server.max_body_bytes`"
            if is_upload(scope):
                most, setting = limits.FILE_BYTES + UPLOAD_FORM_BYTES, "the limit on a file"
            self._check_body(scope, headers, most, setting)
            await self._app(scope, _limited(receive, most, setting), reply)
        except ServerError as error:
            if reply.started:
                raise
            await _refuse(error, scope, receive, reply)

    def _check_host(self, headers: Headers) -> None:
        sent = headers.getlist("host")
        if len(sent) != 1:
            raise Forbidden("A request must have exactly one Host header.")
        name = _host_name(sent[0])
        if name is None or not (
            name in self._hosts
            or is_loopback(name)
            or name.endswith(CONTAINER_HOSTS)
            or (self._any_address and _address(name))
        ):
            raise Forbidden(
                f"The Host {quoted(sent[0])} is not allowed: add it to `server.allowed_hosts`."
            )

    def _check_origin(self, scope: Scope, headers: Headers) -> dict[str, str]:
        """The CORS headers of the answer, empty for callers that are not another page. Raises
        Forbidden for an origin that is not allowed."""
        origins = headers.getlist("origin")
        if not origins:
            # an <img> of another page sends no Origin, but the browser sends this header
            sites = {site.lower() for site in headers.getlist("sec-fetch-site")}
            if sites - OWN_SITES and not self._any_origin:
                raise _forbidden_page("Another page")
            return {}
        if len(origins) == 1 and (self._any_origin or origins[0].lower() in self._origins):
            return {
                "access-control-allow-origin": "*" if self._any_origin else origins[0],
                "access-control-expose-headers": EXPOSED,
                "vary": "Origin",
            }
        scheme = scope.get("scheme", "http").replace("ws", "http")
        if [each.lower() for each in origins] == [f"{scheme}://{headers['host']}".lower()]:
            return {}
        raise _forbidden_page(f"The origin {quoted(', '.join(origins))}")

    def _check_body(self, scope: Scope, headers: Headers, most: int, setting: str) -> None:
        if scope["type"] != "http":
            return
        sent = headers.getlist("content-length") or ["0"]
        if len(sent) > 1 or not LENGTH.fullmatch(sent[0]):
            raise BadRequest("Content-Length must be one whole number.")
        if (length := int(sent[0])) > most:
            raise _too_large(most, setting)
        has_body = length > 0 or "transfer-encoding" in headers
        encodings = ",".join(headers.getlist("content-encoding")).lower().split(",")
        is_encoded = any(encoding.strip() not in {"", "identity"} for encoding in encodings)
        if is_encoded and (has_body or scope["method"] in METHODS_WITH_BODY):
            raise UnsupportedMediaType("The body must not be compressed (no Content-Encoding).")
        if has_body and not is_upload(scope):
            _check_content_type(headers)


def _limited(receive: Receive, limit: int, setting: str) -> Receive:
    """`receive` that raises TooLarge over the limit: a body need not have a Content-Length."""
    seen = 0

    async def receive_counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit, setting)
        return message

    return receive_counted


NO_TIERS: Mapping[str, Tier] = {}


def authorise(
    keys: Collection[str], tiers: Mapping[str, Tier] = NO_TIERS
) -> Callable[[HTTPConnection], Awaitable[None]]:
    """A dependency for routes that require one of these keys; without keys everyone is allowed.
    tiers: those of keys whose requests have another one than the usual.

    It sets five strings in the connection's state. `owner` is a digest of the client's key, or
    empty. `seal_owner` is another one, which the store does not have: without the key, no one can
    open what was sealed for it. `source` has a share of sockets, threads and processes: the owner
    or else the peer's address. `client` takes turns with others: the source or, without keys, a
    program of this machine. `cache_scope` is the owner if there are several keys: whether a prompt
    is in the prompt cache shows in the time to the first token, and is no other user's business.
    """
    seal_owners = {_digest(key.encode()): _digest(b"seals:" + key.encode()).hex() for key in keys}
    digests = [*seal_owners]
    tier_of_key = {_digest(key.encode()): tier for key, tier in tiers.items()}
    programs = Programs()

    async def check_key(connection: HTTPConnection) -> None:
        state = connection.state
        state.owner = state.cache_scope = state.seal_owner = ""
        state.tier = Tier.DEFAULT
        state.source = state.client = _peer(connection.scope)
        client_of_request.set(state.source)
        if not digests:
            if state.source == THIS_MACHINE:
                headers = connection.headers
                program = headers.get(CLIENT_HEADER) or headers.get("user-agent", "")
                state.client = programs.client(state.source, program)
            return
        given = _credentials(connection.headers)
        if not given:
            raise Unauthorized("This server needs a key: send `Authorization: Bearer KEY`.")
        # Comparing the digests of all keys takes a time that reveals nothing about a key.
        matches = [
            key for one in map(_digest, given) for key in digests if hmac.compare_digest(one, key)
        ]
        if not matches:
            raise Unauthorized("This key is not one of the server's `server.api_keys`.")
        state.owner = state.source = state.client = matches[0].hex()
        client_of_request.set(state.source)
        state.seal_owner = seal_owners[matches[0]]
        state.tier = tier_of_key.get(matches[0], Tier.DEFAULT)
        state.cache_scope = state.owner if len(digests) > 1 else ""

    return check_key


async def authorised(connection: HTTPConnection) -> None:
    """Checks the key by the app's own `authorise`: routes are made once and serve any app."""
    await connection.app.state.authorise(connection)


def keyed_router() -> APIRouter:
    """A router whose routes need a key, if the server has keys."""
    return APIRouter(dependencies=[Depends(authorised)])


def client_states(keys: Collection[str]) -> dict[str, dict[str, Any]]:
    """What `authorise` would set for the requests that a server sends itself for each owner."""

    def state(owner: str, seal_owner: str) -> dict[str, Any]:
        source = owner or THIS_MACHINE
        return {
            "owner": owner,
            "seal_owner": seal_owner,
            "source": source,
            "client": f"{source} batch",
            "cache_scope": owner if len(keys) > 1 else "",
            "tier": Tier.BATCH,
        }

    known = {_digest(key.encode()).hex(): _digest(b"seals:" + key.encode()).hex() for key in keys}
    return {owner: state(owner, seal_owner) for owner, seal_owner in (known or {"": ""}).items()}


def signer_of(connection: HTTPConnection) -> Signer:
    """The signer for the client's key, which `authorise` found."""
    signer: Signer = connection.app.state.signer
    return signer.of(connection.state.seal_owner)


def with_client(request: GenerateRequest, connection: HTTPConnection) -> GenerateRequest:
    """Adds what `authorise` found out about the client, and what the headers say. Raises BadRequest
    for one that says nothing."""
    state, hops = connection.state, connection.headers.get(HOPS_HEADER, "")
    return replace(
        request,
        client=state.client,
        tier=tier_of(request, connection.headers, state.tier),
        cache_scope=state.cache_scope,
        hops=int(hops) if HOPS.fullmatch(hops) else 0,
        deterministic=wants(connection, DETERMINISTIC_HEADER),
    )


def wants(connection: HTTPConnection, header: str) -> bool:
    """Whether the client asks for what the header is for. Raises BadRequest for one that says
    nothing."""
    value = connection.headers.get(header, "false").lower()
    if value not in ("true", "false"):
        raise BadRequest(f"`{header}` should be `true` or `false`.")
    return value == "true"


TIERS = {tier.label: tier for tier in Tier} | {
    "standard_only": Tier.DEFAULT,
    "scale": Tier.DEFAULT,
    "fast": Tier.PRIORITY,
    "performance": Tier.PRIORITY,
}

CLASS_HEADER, SEEN = "x-claude-code-request-class", ("main", "side_reply")
"""Claude Code's class of a request, and those whose answers a person reads."""

BACKGROUND_HEADERS = (
    *("x-claude-code-agent-id", "x-openai-subagent", "x-openai-memgen-request"),
    "x-claude-code-auxiliary-type",
)
"""Claude Code and Codex send one with what their sub-agents ask, and for compaction, reviews and
memories."""

BACKGROUND_PROMPTS = (
    *("You are a title generator", "You are a helpful AI assistant tasked with summarizing"),
    "Generate a concise, sentence-case title",
)
SUBAGENT = re.compile(rf"\A{BILLING}:[^\n]{{0,1000}}; cc_is_subagent=true;")


def tier_of(request: GenerateRequest, headers: Headers, tier_of_key: Tier) -> Tier:
    """Returns the tier that the request asks for, or else that of its key, or FLEX if its client
    sends it in the background. A batch can't choose: its clients wait for none of its lines."""
    if tier_of_key is Tier.BATCH:
        return tier_of_key
    if request.service_tier not in (None, "auto"):
        return TIERS[request.service_tier]
    return max(tier_of_key, Tier.FLEX) if _is_background(request, headers) else tier_of_key


def _is_background(request: GenerateRequest, headers: Headers) -> bool:
    if headers.get(CLASS_HEADER, SEEN[0]) not in SEEN:
        return True
    if any(name in headers for name in BACKGROUND_HEADERS):
        return True
    first = request.prompts[0]
    if not isinstance(first, Conversation) or not first.messages:
        return False
    system = (message.content for message in first.messages if message.role in INSTRUCTION_ROLES)
    return any(text.startswith(BACKGROUND_PROMPTS) or SUBAGENT.match(text) for text in system)


def _peer(scope: Scope) -> str:
    """The peer's address. A program of this machine can choose among all that are loopback."""
    if not (peer := scope.get("client")):
        return ""
    return THIS_MACHINE if is_loopback(peer[0]) else source_of(peer[0])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _credentials(headers: Headers) -> list[bytes]:
    """The keys that were sent, as bytes: compare_digest does not accept non-ASCII text."""
    bearers = [value.split(None, 1) for value in headers.getlist("authorization")]
    given = [pair[1] for pair in bearers if len(pair) == 2 and pair[0].lower() == "bearer"]
    given += headers.getlist("x-api-key")
    return [key.strip().encode("latin-1") for key in given if key.strip()]


def _request_id(headers: Headers) -> str:
    sent = headers.getlist("x-request-id")
    if len(sent) == 1 and REQUEST_ID.fullmatch(sent[0]):
        return sent[0]
    return f"req_{uuid.uuid4().hex}"


def _host_name(host: str) -> str | None:
    """The name in a Host header, in lower case and without its port; None if it is malformed."""
    match = HOST.fullmatch(host)
    if match is None:
        return None
    name = match[1].lower()
    if not name.startswith("["):
        return name
    address = _address(name[1:-1])
    return str(address) if isinstance(address, ipaddress.IPv6Address) else None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    # Strict: octal, hexadecimal and shortened forms, which parsers read differently, are refused.
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _configured_name(host: str) -> str | None:
    """Like `_host_name`, but an IPv6 address needs no brackets."""
    address = _address(host.strip("[]"))
    return str(address) if address else _host_name(host)


def _allowed_host(host: str) -> str:
    name = _configured_name(host)
    if name is None:
        raise SettingsError(f"server.allowed_hosts: {quoted(host)} is not a host name.")
    return name


def _allowed_origin(origin: str) -> str:
    """The origin as browsers send it: in lower case, without a path or a default port."""
    match = ORIGIN.fullmatch(origin.lower().removesuffix("/"))
    if match is None:
        raise SettingsError(
            f"server.allowed_origins: {quoted(origin)} should look like `https://example.com`."
        )
    scheme, host, port = match.groups()
    if port is None or DEFAULT_PORTS.get(scheme) == port:
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{port}"


def _forbidden_page(who: str) -> Forbidden:
    return Forbidden(
        f"{who} is not allowed to use this server: add its origin to `server.allowed_origins`."
    )


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope.get("method") == "OPTIONS" and "access-control-request-method" in headers


def _preflight(headers: Headers) -> Response:
    names = headers.get("access-control-request-headers", "").split(",")
    allowed = [name.strip() for name in names if TOKEN.fullmatch(name.strip())]
    answer = {
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": ", ".join(allowed),
        "access-control-max-age": PREFLIGHT_SECONDS,
    }
    return Response(status_code=204, headers=answer)


def _check_content_type(headers: Headers) -> None:
    sent = headers.getlist("content-type")
    # browsers send one of these with every request that has a body
    of_browser = any(name == "origin" or name.startswith("sec-fetch-") for name in headers)
    is_untyped = sent in UNTYPED and not of_browser
    if not is_untyped and (len(sent) != 1 or not _is_utf8_json(sent[0])):
        raise UnsupportedMediaType(
            "The Content-Type must be application/json, in UTF-8. Only `POST /v1/files` takes "
            "files: this server reads no speech and edits no pictures."
        )


def _is_utf8_json(content_type: str) -> bool:
    media, *parameters = (part.strip().lower() for part in content_type.split(";"))
    pairs = [parameter.partition("=") for parameter in parameters]
    charsets = {value.strip(' "') for name, _, value in pairs if name.strip() == "charset"}
    return media == "application/json" and charsets <= {"utf-8", "utf8"}


def _too_large(limit: int, setting: str) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes, {setting}.")


async def _refuse(error: ServerError, scope: Scope, receive: Receive, send: Send) -> None:
    can_answer = "websocket.http.response" in (scope.get("extensions") or {})
    if scope["type"] == "websocket" and not can_answer:
        await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        return
    await error_response(error, scope)(scope, receive, send)


KEY_FILE = "secret.key"

KEY_BYTES = 32

log = logging.getLogger("mlx_server")


def secret_key(folder: Path | None) -> bytes:
    """The key in this folder, made on first use and readable by the owner only.

    Without a folder, or where none can be written, the key is new each time: signatures of an
    earlier server are then unknown.
    """
    if folder is None:
        return secrets.token_bytes(KEY_BYTES)
    path = folder / KEY_FILE
    try:
        _create(path)
        with open_regular(own_path(path), is_own=True) as file:
            key = file.read(KEY_BYTES + 1)
    except OSError as error:
        log.warning(
            "%s in the data directory can't be used, so this server signs with a new key: %s",
            KEY_FILE,
            error.strerror,
        )
        return secrets.token_bytes(KEY_BYTES)
    if len(key) != KEY_BYTES:
        log.warning(
            "%s in the data directory is damaged: delete it, and the server makes a new one",
            KEY_FILE,
        )
        return secrets.token_bytes(KEY_BYTES)
    return key


def _create(path: Path) -> None:
    """Writes a new key unless there is one. It appears whole, also if two servers start at once."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{KEY_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_private(draft, secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
