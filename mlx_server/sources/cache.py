"""Where this server keeps what it made, and how the making of it is told."""

import os
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`, in bytes or units, total > 0. It may be called in any thread."""


def cache_dir() -> Path:
    """`MLX_SERVER_CACHE`, or `~/.cache/mlx-server`."""
    folder = os.environ.get("MLX_SERVER_CACHE") or "~/.cache/mlx-server"
    return Path(os.path.expanduser(folder)).absolute()
