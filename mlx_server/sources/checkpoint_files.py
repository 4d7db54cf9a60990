"""The files of a checkpoint, and the checks that need only the small ones, without weights."""

import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import chain
from pathlib import Path
from typing import Any

from mlx_server import limits
from mlx_server.errors import ModelUnusable
from mlx_server.models.adapter_config import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS
from mlx_server.models.architectures import why_unknown
from mlx_server.models.files import check_model, read_json, tensor_names
from mlx_server.models.tokenizer import read_tokenizer
from mlx_server.sources.tokenizer_conversion import TOKENIZERS
from mlx_server.sources.tokenizer_files import tokenizer_json

SHARD = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")
WEIGHTS = re.compile(r"model[^/]*\.safetensors")

OTHER_WEIGHTS = re.compile(r"(?!adapter).*\.(?:bin|gguf|h5|msgpack|npz|onnx|pth?|safetensors)")

NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")
LAYERS = re.compile("(layer|block)s?$")
MORE_LAYERS = 128
"""The number of layers that a config may have in excess of the weights: its vision tower may have
been left out, or layers may share their weights."""

COUNT = re.compile("(layer|expert|block|loop)s?$")
"""Names of settings that are numbers of layers, or of parts of them."""

SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
NEEDED = ["*.json", "*.jinja", "*.model", "model*.safetensors"]
WANTED = [*SMALL, "model*.safetensors"]
ADAPTER_FILES = [CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS]
SHOWN = 8
"""The number of missing files that an error lists by name."""

NESTED = ["[!1a]*/*", "a[!d]*/*"]
"""What is not fetched: subfolders hold the model in other formats, and the `*` of a pattern matches
a "/" too. `1_Pooling` of sentence-transformers and `additional_chat_templates` are exceptions."""


def missing(folder: Path) -> list[str]:
    return missing_of(path.name for path in folder.glob("*") if path.is_file())


def weights_instead(folder: Path) -> str | None:
    """A file of weights of another format or name, in a folder without others."""
    names = sorted(path.name for path in folder.glob("*"))
    if any(map(WEIGHTS.fullmatch, names)):
        return None
    return next(filter(OTHER_WEIGHTS.fullmatch, names), None)


def missing_of(names: Iterable[str]) -> list[str]:
    """Lists the files that a checkpoint with these files lacks.

    Raises ModelUnusable if the names promise too many files of weights.
    """
    present = set(names)
    weights = set(filter(WEIGHTS.fullmatch, present))
    shards = filter(None, map(SHARD.fullmatch, weights))
    series = {(shard[1], len(shard[2]), shard[3]) for shard in shards}
    most = limits.CHECKPOINT_FILES
    if max(len(weights), sum(int(count) for _, _, count in series)) > most:
        raise ModelUnusable(
            f"The checkpoint names more than {most:,} files of weights. Download the model again."
        )
    lacking = [] if "config.json" in present else ["config.json"]
    lacking += [] if present & set(TOKENIZERS) else ["tokenizer.json"]
    lacking += _missing_shards(series, weights) if weights else ["model*.safetensors"]
    more = len(lacking) - SHOWN
    return lacking if more <= 0 else [*lacking[:SHOWN], f"{more} more files"]


def _missing_shards(series: Iterable[tuple[str, int, str]], weights: AbstractSet[str]) -> list[str]:
    """The files that the numbers of others promise: of the files with one stem, those of the series
    that lacks the fewest. Further series, and files next to a whole one, are of an older copy.

    series: stem, digits of the number, and count.
    """
    lacking = {name.removesuffix(".safetensors"): set[str]() for name in weights}
    for stem, digits, count in series:
        first = 0 if f"{stem}-{0:0{digits}}-of-{count}.safetensors" in weights else 1
        numbers = range(first, first + int(count))
        names = {f"{stem}-{number:0{digits}}-of-{count}.safetensors" for number in numbers}
        lacking[stem] = min(names - weights, lacking.get(stem, names), key=len)
    return sorted(chain(*lacking.values()))


def check_small_files(folder: Path, name: str) -> None:
    """Raises ModelUnusable if the small files show that the model can't be used."""
    check_model(folder)
    check_architecture(read_json(folder / "config.json"), name)
    read_tokenizer(tokenizer_json(folder))


def check_architecture(config: dict[str, Any], name: str) -> None:
    if why := why_unknown(config):
        raise ModelUnusable(f"{name} can't be used: {why}")
    for key, count in _counts(config):
        if count > limits.CHECKPOINT_LAYERS:
            raise ModelUnusable(
                f"config.json: {key[-60:]} is {str(count)[:20]}; the limit is "
                f"{limits.CHECKPOINT_LAYERS}. Download the model again."
            )


def check_layer_count(config: dict[str, Any], folder: Path) -> None:
    """Raises ModelUnusable if config.json promises far more layers than the weights have: to make
    each takes the engine milliseconds, in which it computes nothing else."""
    promised = [it for it in _counts(config) if LAYERS.search(it[0]) and it[1] > MORE_LAYERS]
    if not promised:
        return
    key, count = max(promised, key=lambda it: it[1])
    layers = len({number for name in tensor_names(folder) for number in NUMBER.findall(name)})
    if count > layers + MORE_LAYERS:
        raise ModelUnusable(
            f"config.json: {key[-60:]} is {count}, but the weights have {layers} layers. Download "
            "the model again."
        )


def _counts(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The settings that decide how many layers mlx-lm makes, in nested configs too."""
    for key, found in config.items():
        if isinstance(found, dict):
            yield from _counts(found)
        elif COUNT.search(key):
            each = found if isinstance(found, list) else [found]
            yield from ((key, count) for count in each if type(count) is int)
