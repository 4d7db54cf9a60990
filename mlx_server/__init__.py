"""A local inference server for language models on Apple silicon (MLX)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_server.reading import OutputReader, read

__all__ = ["OutputReader", "__version__", "read"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the library's functions at their first use, so that commands start without them."""
    if name not in ("OutputReader", "read"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlx_server import reading

    return getattr(reading, name)
