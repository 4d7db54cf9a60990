"""The file of a login, with its tokens and the server that refreshes them."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from mlx_server.mcp.errors import McpError

Json = dict[str, Any]
FOLDER = "logins"
PRIVATE = 0o600
FILE_BYTES = 1 << 20
"""The size above which a file is taken to be damaged, and is not read."""


class LoginUnusable(McpError):
    """The file of a login can't be used."""


class Login(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    """The MCP server that the tokens are for."""
    tokens: Json = msgspec.field(default_factory=dict)
    expires_at: float | None = None
    client: Json
    """The registration of this client with the authorization server."""
    authorization_server: Json | None = None
    """The metadata of the authorization server."""
    resource: Json | None = None
    """The MCP server's metadata as a protected resource."""
    wanted_scope: str | None = None
    """A scope that the server required and the tokens lack. The next login requests it."""


def path_in(data_dir: Path, name: str) -> Path:
    """The file of this connector's login. The connector's name is quoted, since it may have
    characters that a file's name can't have."""
    return data_dir / FOLDER / f"{quote(name, safe='')}.json"


def read(path: Path) -> Login | None:
    """The login in a file; None if there is no file. Raises LoginUnusable for a damaged file, or
    one that other users could read or write."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LoginUnusable(f"The login in {path.name} can't be read: {error.strerror}.") from None
    try:
        _check(os.fstat(file), path)
        text = os.read(file, FILE_BYTES)
    finally:
        os.close(file)
    try:
        return msgspec.json.decode(text, type=Login)
    except (msgspec.DecodeError, ValueError):
        raise LoginUnusable(f"The login in {path.name} is damaged: log in again.") from None


def _check(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES:
        raise LoginUnusable(f"The login in {path.name} is damaged: log in again.")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LoginUnusable(
            f"The login in {path.name} is not private: other users may have read or written it. "
            "Log in again, which replaces it."
        )


def write(path: Path, login: Login) -> None:
    """Replaces the file atomically by one that only its owner can read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
    try:
        with os.fdopen(file, "wb") as writing:
            writing.write(msgspec.json.encode(login))
            writing.flush()
            os.fsync(file)
        draft.replace(path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def remove(path: Path) -> bool:
    """Removes the file. Returns whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
