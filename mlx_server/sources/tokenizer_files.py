"""A model's tokenizer.json: its own, or one made from what it has in its place and kept."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import tokenizers

from mlx_server.checkpoints.byte_level import kimi_tokenizer
from mlx_server.checkpoints.checkpoint import read_json
from mlx_server.checkpoints.sentencepiece_model import sentencepiece_tokenizer
from mlx_server.errors import ModelUnusable, public_message
from mlx_server.sources.cache import cache_dir

FORMAT = 1
"""To be raised whenever the files come out different, so that old ones are not taken for new."""

OWN = "tokenizer.json"

MADE_FROM: dict[str, Callable[[Path, Mapping[str, Any]], tokenizers.Tokenizer]] = {
    "tiktoken.model": kimi_tokenizer,
    "tokenizer.model": sentencepiece_tokenizer,
}
TOKENIZERS = (OWN, *MADE_FROM)
"""The first that is there is used."""


def tokenizer_json(folder: Path) -> Path:
    """Raises ModelUnusable where none can be made."""
    found = [name for name in TOKENIZERS if (folder / name).is_file()]
    if not found or found[0] == OWN:
        return folder / OWN
    source = folder / found[0]
    config = read_json(folder / "tokenizer_config.json", optional=True)
    made = cache_dir() / "tokenizers" / _digest(source, config) / OWN
    if not made.is_file():
        _keep(MADE_FROM[source.name](source, config), made)
    return made


def _digest(source: Path, config: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(f"{FORMAT} {source.name} {json.dumps(config)}".encode())
    digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _keep(tokenizer: tokenizers.Tokenizer, made: Path) -> None:
    """There whole or not at all."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=made.parent, encoding="utf-8", delete=False) as file:
            file.write(tokenizer.to_str())
        os.replace(file.name, made)
    except OSError as error:
        raise ModelUnusable(
            f"The tokenizer that was made of this model can't be kept: {public_message(error)}. "
            "Give the cache some writable disk, or set MLX_SERVER_CACHE to another folder."
        ) from None
