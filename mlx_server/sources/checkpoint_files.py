"""The files of a checkpoint, and the checks that need only the small ones, without weights."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlx_server import limits
from mlx_server.checkpoints.architectures import why_unknown
from mlx_server.checkpoints.checkpoint import read_json
from mlx_server.checkpoints.folder_check import check_model
from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.errors import ModelUnusable
from mlx_server.lora.config import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS
from mlx_server.sources.tokenizer_files import TOKENIZERS, tokenizer_json

SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
WEIGHTS = re.compile(r"model[^/]*\.safetensors")

COUNT = re.compile("(layer|expert|block|loop)s?$")
"""Names of settings that are numbers of layers, or of parts of them."""

SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
NEEDED = ["*.json", "*.jinja", "*.model", "model*.safetensors"]
WANTED = [*SMALL, "model*.safetensors"]
ADAPTER_FILES = [CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS]
SHOWN = 8
"""The number of missing files that an error lists by name."""

# Ignored: subfolders hold the model in other formats, and the `*` of a pattern matches a "/" too.
# `1_Pooling` of sentence-transformers is the exception.
NESTED = "[!1]*/*"


def missing(folder: Path) -> list[str]:
    return missing_of(path.name for path in folder.glob("*") if path.is_file())


def missing_of(names: Iterable[str]) -> list[str]:
    """Lists the files that a checkpoint with these files lacks.

    Raises ModelUnusable if the names promise too many files of weights.
    """
    present = set(names)
    weights = set(filter(WEIGHTS.fullmatch, present))
    series = {shard.groups() for shard in map(SHARD.fullmatch, weights) if shard}
    most = limits.CHECKPOINT_FILES.value
    if max(len(weights), sum(int(count) for _, count in series)) > most:
        raise ModelUnusable(
            f"The checkpoint names more than {most:,} files of weights. Download the model again."
        )
    shards = {
        f"{stem}-{number:05}-of-{count}.safetensors"
        for stem, count in series
        for number in range(1, int(count) + 1)
    }
    lacking = [] if "config.json" in present else ["config.json"]
    lacking += [] if present & set(TOKENIZERS) else ["tokenizer.json"]
    lacking += sorted(shards - weights) + ([] if weights else ["model*.safetensors"])
    more = len(lacking) - SHOWN
    return lacking if more <= 0 else [*lacking[:SHOWN], f"{more} more files"]


def check_small_files(folder: Path, name: str) -> None:
    """Raises ModelUnusable if the small files show that the model can't be used."""
    check_model(folder)
    check_architecture(read_json(folder / "config.json"), name)
    Tokenizer(tokenizer_json(folder))


def check_architecture(config: dict[str, Any], name: str) -> None:
    if why := why_unknown(config):
        raise ModelUnusable(f"{name} can't be used: {why}")
    for key, count in _counts(config):
        if count > limits.CHECKPOINT_LAYERS.value:
            raise ModelUnusable(
                f"config.json: {key[-60:]} is {str(count)[:20]}; the limit is "
                f"{limits.CHECKPOINT_LAYERS.value}. Download the model again."
            )


def _counts(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The settings that decide how many layers mlx-lm makes, in nested configs too."""
    for key, found in config.items():
        if isinstance(found, dict):
            yield from _counts(found)
        elif COUNT.search(key):
            each = found if isinstance(found, list) else [found]
            yield from ((key, count) for count in each if type(count) is int)
