"""Signatures of thoughts, which clients send back with the signature they came with, and sealed
texts, which clients keep without reading them."""

import base64
import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

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
