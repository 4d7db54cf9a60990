"""How models that see are shown pictures: in which size, and as which tokens of a prompt.

A model sees if its family is in the table here, its checkpoint has a vision tower, and the extra
`vision` is installed: mlx-vlm has the towers, and Pillow decodes pictures.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mlx_server import limits
from mlx_server.models.files import read_optional_json
from mlx_server.sandbox.files import Fit, Grid

log = logging.getLogger("mlx_server.models")

INSTALL = "pip install --no-deps 'mlx-vlm>=0.7.10,<0.8' 'pillow>=13,<14'"
"""Installs all that is needed: what else mlx-vlm names as its dependencies is not used."""

BICUBIC = 3

Sections = Literal["interleaved", "consecutive"]
"""How the three positions of a token (time, row and column) are spread over a head's values."""


@dataclass(frozen=True)
class VisionFamily:
    tower: str
    """mlx-vlm's module that has the tower."""
    placeholder: str
    """What chat templates write for a picture; it has one image token."""
    sections: Sections
    patch: int
    """The pixels of the side of a patch, unless the checkpoint's files say it."""


QWEN = "<|vision_start|><|image_pad|><|vision_end|>"

FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_5_vl": VisionFamily("qwen2_5_vl", QWEN, "consecutive", 14),
    "qwen3_vl": VisionFamily("qwen3_vl", QWEN, "interleaved", 16),
    "qwen3_vl_moe": VisionFamily("qwen3_vl_moe", QWEN, "interleaved", 16),
    "qwen3_5": VisionFamily("qwen3_vl", QWEN, "interleaved", 16),
    "qwen3_5_moe": VisionFamily("qwen3_vl", QWEN, "interleaved", 16),
}
"""By model type."""


IN_TOWER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:visual|vision_tower)\.(.+)")
"""Matches the names of a tower's tensors; the group is the name that they have in the tower."""


@dataclass(frozen=True)
class Vision:
    """How the pictures of one checkpoint become tokens."""

    family: VisionFamily
    token: int
    """The image token: what the placeholder has once, and the prompt as often as `count` says."""
    patch: int
    merge: int
    """The side of the square of patches that becomes one token."""
    least: int
    most: int
    """The least and the most pixels of a picture."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """The mean and the deviation of the values of pixels, between 0 and 1, by colour."""
    filter: int

    @property
    def cell(self) -> int:
        """The pixels of the side of one token."""
        return self.patch * self.merge

    def fit(self, detail: str | None = None) -> Fit:
        tokens = limits.LOW_DETAIL_TOKENS if detail == "low" else limits.PICTURE_TOKENS
        most = min(self.most, tokens * self.cell**2)
        return Grid(self.cell, min(self.least, most), most)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """The rows and columns of tokens of a picture that has its size for the model."""
        return height // self.cell, width // self.cell

    def count(self, width: int, height: int) -> int:
        rows, columns = self.grid(width, height)
        return rows * columns


def vision_of(folder: Path, config: Mapping[str, Any]) -> Vision | None:
    """None for a checkpoint without a tower, or of a family that is not in the table."""
    family = FAMILIES.get(str(config.get("model_type")))
    tower, token = config.get("vision_config"), config.get("image_token_id")
    if family is None or not isinstance(tower, dict) or type(token) is not int:
        return None
    given = read_optional_json(folder / "preprocessor_config.json")
    given = given or read_optional_json(folder / "processor_config.json").get("image_processor", {})
    size = given.get("size")
    size = size if isinstance(size, dict) else {}
    patch = _natural(given.get("patch_size"), tower.get("patch_size"), family.patch)
    merge = _natural(given.get("merge_size"), tower.get("spatial_merge_size"), 2)
    return Vision(
        family,
        token,
        patch,
        merge,
        _natural(size.get("shortest_edge"), given.get("min_pixels"), 56 * 56),
        _natural(size.get("longest_edge"), given.get("max_pixels"), 14 * 14 * 4 * 1280),
        _three(given.get("image_mean")),
        _three(given.get("image_std")),
        BICUBIC,
    )


def _natural(*given: object) -> int:
    """The first positive number."""
    return next(each for each in given if type(each) is int and each > 0)


def _three(given: object) -> tuple[float, ...]:
    if isinstance(given, list) and len(given) == 3 and all(type(each) is float for each in given):
        return tuple(given)
    return (0.5, 0.5, 0.5)


@cache
def can_see() -> bool:
    """Whether the extra `vision` is installed. What is missing is logged once."""
    missing = [name for name in ("mlx_vlm", "PIL") if find_spec(name) is None]
    if missing:
        log.warning(
            "models are shown no pictures, since %s is not installed: %s",
            " and ".join(missing),
            INSTALL,
        )
    return not missing
