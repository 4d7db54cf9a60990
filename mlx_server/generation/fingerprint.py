"""OpenAI's `system_fingerprint`: it changes when the same seed may give other tokens."""

from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version

from mlx_server import __version__
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.prepare import PreparedModel

PACKAGES = ("mlx", "mlx-lm")
LETTERS = 10
"""The number of hexadecimal digits, the same as in OpenAI's fingerprints."""


def system_fingerprint(prepared: PreparedModel, adapter: LeasedAdapter | None) -> str:
    """A digest of what computes the answer: the software, the model's files and the adapter's."""
    parts = (_software(), prepared.stamp, adapter.spec.digest if adapter else None)
    return f"fp_{sha256(repr(parts).encode()).hexdigest()[:LETTERS]}"


@cache
def _software() -> tuple[str, ...]:
    return (__version__, *map(_version, PACKAGES))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
