"""Signatures of thoughts, which clients send back with the signature that they came with, or only
as a signature that carries them."""

import base64
import hashlib
import hmac

SIGNED, SEALED = "mlx1.", "mlx2."
"""Beginnings of a signature of a thought, and of one that carries the thought."""

MAC_BYTES = 32


class Signer:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, thought: str) -> str:
        return SIGNED + _encoded(self._mac(_bytes(thought)))

    def seal(self, thought: str) -> str:
        """A signature with the thought in it, for a client that does not want to see it."""
        raw = _bytes(thought)
        return SEALED + _encoded(self._mac(raw) + raw)

    def is_own(self, thought: str, signature: str) -> bool:
        """Whether this server wrote the thought, and that it is unchanged."""
        if signature.startswith(SEALED):
            return self.opened(signature) is not None
        raw = _decoded(signature, SIGNED)
        return raw is not None and hmac.compare_digest(raw, self._mac(_bytes(thought)))

    def opened(self, signature: str) -> str | None:
        """The thought in a signature of `seal`; None for any other signature."""
        raw = _decoded(signature, SEALED)
        if raw is None or not hmac.compare_digest(raw[:MAC_BYTES], self._mac(raw[MAC_BYTES:])):
            return None
        return raw[MAC_BYTES:].decode()

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
