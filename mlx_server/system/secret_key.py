"""The key with which the server signs what clients keep for it."""

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from mlx_server.system.own_files import own_path, write_private
from mlx_server.system.regular_files import open_regular

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
            found = file.read(KEY_BYTES + 1)
    except OSError as error:
        log.warning(
            "%s in the data directory can't be used, so this server signs with a new key: %s",
            KEY_FILE,
            error.strerror,
        )
        return secrets.token_bytes(KEY_BYTES)
    if len(found) != KEY_BYTES:
        log.warning(
            "%s in the data directory is damaged: delete it, and the server makes a new one",
            KEY_FILE,
        )
        return secrets.token_bytes(KEY_BYTES)
    return found


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
