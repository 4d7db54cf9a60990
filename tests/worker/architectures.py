"""A tiny random checkpoint of every architecture of mlx-lm that has a family here."""

from pathlib import Path
from typing import Any

import yaml

from tests.worker.kinds import Kind

TABLE = yaml.load(Path(__file__).with_suffix(".yaml").read_text("utf-8"), yaml.CSafeLoader)

CONFIGS: dict[str, dict[str, Any]] = TABLE["configs"]
LINEAR: dict[str, Any] = TABLE["parts"]["linear"]
WINDOW = 32
"""The tokens of sliding windows."""

ARCHITECTURES = tuple(Kind(name, config) for name, config in CONFIGS.items())
