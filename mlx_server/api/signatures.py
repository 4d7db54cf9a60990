"""The server's key and its signatures: of thoughts, which clients send back with the signature they
came with, and of sealed texts, which clients keep without reading them."""

import base64
import hashlib
import hmac
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from mlx_server.system.files import open_regular, own_path, write_private

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
