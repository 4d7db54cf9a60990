"""The loaded models whose prompt caches can be kept on disk, and the names of their files."""

import logging
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_server.checkpoints.folder_check import identity_of_model
from mlx_server.errors import public_message
from mlx_server.prompt_files.names import group_of
from mlx_server.worker.prefill.cache_layout import CacheLayout, layout_of
from mlx_server.worker.prefill.prompt_cache import BETWEEN

log = logging.getLogger("mlx_server.engine")

FORMAT = "1"
"""The version of the files' format. Files of another version are not used."""


@dataclass(frozen=True)
class DiskModel:
    id: str
    identity: str
    """A digest of the model's files, the versions of MLX and the layout of the caches."""
    layout: CacheLayout

    def group(self, key: str) -> str:
        """Returns the group of files for this key of the prompt cache. The key's other parts are
        the adapter's digest, its scale and the cache scope."""
        _, *others = key.split(BETWEEN)
        return group_of(FORMAT, self.identity, *others)


class DiskModels:
    def __init__(self) -> None:
        self._models: dict[str, DiskModel] = {}

    def add(self, id: str, path: Path, network: nn.Module) -> None:
        try:
            if layout := layout_of(network):
                device = "metal" if mx.metal.is_available() else "cpu"
                versions = (version("mlx"), version("mlx-lm"), device)
                files = identity_of_model(path)
                self._models[id] = DiskModel(
                    id, group_of(files, *versions, layout.describe()), layout
                )
        except Exception as error:  # the model works without files
            log.warning(
                "the prompt caches of %s are not kept on disk: %s", id, public_message(error)
            )

    def forget(self, id: str) -> None:
        self._models.pop(id, None)

    def of(self, key: str) -> DiskModel | None:
        """Returns the model that computes the prompts with this key; None if it has no files."""
        return self._models.get(key.partition(BETWEEN)[0])
