"""Models that are read as the pool reads them."""

from pathlib import Path
from typing import Any

from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare


def of(folder: Path, **spec: Any) -> PreparedModel:
    return prepare(ModelSpec("m", str(folder), **spec), lambda *_: None, upcast=True)
