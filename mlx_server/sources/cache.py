"""The folder for files that the server makes, and the type of progress callbacks."""

import os
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)`, in bytes or items, with total > 0, from any thread."""

CACHE_VARIABLE = "MLX_SERVER_CACHE"


def cache_dir() -> Path:
    """The folder that `MLX_SERVER_CACHE` names, or `~/.cache/mlx-server`."""
    folder = os.environ.get(CACHE_VARIABLE) or "~/.cache/mlx-server"
    return Path(os.path.expanduser(folder)).absolute()
