"""Tokenizers that replay models may bring."""

import json
from pathlib import Path

import pytest

from mlx_server.families import FAMILIES
from tests.families import byte_level

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def owned(folder: Path, **tokenizer_config: object) -> Path:
    folder.mkdir(exist_ok=True)
    byte_level().save(str(folder / "tokenizer.json"))
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), "utf-8")
    return folder
