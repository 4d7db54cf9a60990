"""Joins the group of MLX's distributed backend, as `mlx.launch` has processes do it."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from mlx_server.engine.worker_arguments import RankGroup
from mlx_server.worker.share import Share


def joined(group: RankGroup, rank: int) -> Share:
    """Returns the rank's share when all ranks have connected. Raises RuntimeError if they can't."""
    return Share(connected(group, rank), group.mode)


def connected(group: RankGroup, rank: int) -> mx.distributed.Group:
    os.environ.update(group.backend_variables() | {"MLX_RANK": str(rank)})
    with TemporaryDirectory() as folder:
        for variable, text in group.backend_files().items():
            file = Path(folder) / variable
            file.write_text(text, "utf-8")
            os.environ[variable] = str(file)
        backend = "ring" if group.backend == "ring" else "jaccl"
        return mx.distributed.init(strict=True, backend=backend)
