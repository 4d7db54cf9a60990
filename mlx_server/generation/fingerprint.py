"""OpenAI's `system_fingerprint`, which changes whenever the same seed may give other tokens."""

from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version

from mlx_server import __version__
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.prepare import PreparedModel

PACKAGES = ("mlx", "mlx-lm")
DIGITS = 10
"""The number of hexadecimal digits, the same as in OpenAI's fingerprints."""


def system_fingerprint(prepared: PreparedModel, adapter: LeasedAdapter | None) -> str:
    """A digest of the software's versions and of the files of the model and the adapter."""
    parts = (_software(), prepared.stamp, adapter.spec.digest if adapter else None)
    return f"fp_{sha256(repr(parts).encode()).hexdigest()[:DIGITS]}"


@cache
def _software() -> tuple[str, ...]:
    return (__version__, *map(_version, PACKAGES))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
