"""Tokenizers that replay models may bring."""

import json
from pathlib import Path

import pytest

from mlx_server.families import FAMILIES, family_named
from tests.families import byte_level

SOME_FAMILIES = pytest.mark.parametrize(
    "family", [*FAMILIES[::6], family_named("gpt_oss")], ids=lambda family: family.name
)
"""The one that brings a tokenizer of its own, and some that get one of bytes."""


def owned(folder: Path, **tokenizer_config: object) -> Path:
    folder.mkdir(exist_ok=True)
    byte_level().save(str(folder / "tokenizer.json"))
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), "utf-8")
    return folder
