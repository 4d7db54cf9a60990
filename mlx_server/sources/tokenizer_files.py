"""A model's tokenizer.json: its own, or one converted from another format and cached."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers

from mlx_server.checkpoints.byte_level import kimi_tokenizer
from mlx_server.checkpoints.checkpoint import read_json
from mlx_server.errors import ModelUnusable, public_message
from mlx_server.sources.cache import cache_dir
from mlx_server.system.regular_files import read_regular

FORMAT = 1
"""Increase this whenever the written files change, so that files in the cache are made again."""

OWN = "tokenizer.json"


def _of_sentencepiece(file: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    # few models need it, and it takes long to import
    from mlx_server.checkpoints.sentencepiece_model import sentencepiece_tokenizer

    return sentencepiece_tokenizer(file, config)


MADE_FROM: dict[str, Callable[[Path, Mapping[str, Any]], tokenizers.Tokenizer]] = {
    "tiktoken.model": kimi_tokenizer,
    "tokenizer.model": _of_sentencepiece,
}
TOKENIZERS = (OWN, *MADE_FROM)
"""Names of tokenizer files; the first that exists is used."""


def tokenizer_json(folder: Path) -> Path:
    """Returns the path of a tokenizer.json. Raises ModelUnusable if the conversion fails."""
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
    digest.update(read_regular(source))
    return digest.hexdigest()[:32]


def _keep(tokenizer: tokenizers.Tokenizer, made: Path) -> None:
    """Writes a temporary file and moves it, so that no incomplete file is left."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=made.parent) as folder:
            draft = Path(folder, OWN)
            draft.write_text(tokenizer.to_str(), "utf-8")
            os.replace(draft, made)
    except OSError as error:
        raise ModelUnusable(
            f"Can't write the model's converted tokenizer to the cache: {public_message(error)}. "
            "Make the cache writable, or set MLX_SERVER_CACHE to another folder."
        ) from None
