"""Checks the files of a downloaded model folder, which may be malicious, before they are read."""

import os
from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

from mlx_server import limits
from mlx_server.errors import ModelUnusable
from mlx_server.system.files import open_regular, read_regular

WEIGHTS = "model*.safetensors"

MOST_BYTES: Mapping[str, int] = {
    "config.json": 4 << 20,
    "generation_config.json": 1 << 20,
    "hf_quant_config.json": 4 << 20,
    "tokenizer_config.json": 16 << 20,
    "special_tokens_map.json": 4 << 20,
    "added_tokens.json": 4 << 20,
    "tokenizer.json": limits.TOKENIZER_BYTES,
    "tokenizer.model": 64 << 20,
    "tiktoken.model": 64 << 20,
    "chat_template.jinja": 1 << 20,
    "chat_template.json": 1 << 20,
    "processor_config.json": 4 << 20,
    "additional_chat_templates/default.jinja": 1 << 20,
    "additional_chat_templates/tool_use.jinja": 1 << 20,
    "modules.json": 1 << 20,
    "1_Pooling/config.json": 4 << 20,
    "config_sentence_transformers.json": 1 << 20,
    "sentence_bert_config.json": 1 << 20,
}
"""Size limits of the files, other than weights, that mlx-server or mlx-lm reads. Real files have at
most a tenth of it."""


Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, modification time and size of each file that exists."""


def stamp_of_model(folder: Path) -> Stamp:
    """A value that changes when a file of the model is replaced, modified, added or removed."""
    return stamp_of_files(sorted({*_weights(folder), *map(folder.joinpath, MOST_BYTES)}))


def _weights(folder: Path) -> list[Path]:
    """The weight files, up to one more than the limit."""
    return list(islice(folder.glob(WEIGHTS), limits.CHECKPOINT_FILES + 1))


def stamp_of_files(paths: Iterable[Path]) -> Stamp:
    return tuple(filter(None, map(_stamp_of, paths)))


def _stamp_of(path: Path) -> tuple[str, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return path.name, found.st_ino, found.st_mtime_ns, found.st_size


SAMPLES, SAMPLE_BYTES = 4, 4096
"""The samples that are taken of each file of weights, in addition to its header and the time it was
modified."""


def identity_of_model(folder: Path) -> str:
    """A digest that other files do not have. Weights are not read whole, which takes minutes."""
    whole = sha256(repr(stamp_of_model(folder)).encode())
    whole.update(read_regular(folder / "config.json"))
    for path in sorted(_weights(folder)):
        size = path.stat().st_size
        with open_regular(path) as file:
            for at in range(SAMPLES):
                file.seek(size * at // SAMPLES)
                whole.update(file.read(SAMPLE_BYTES))
    return whole.hexdigest()


def is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def is_own(path: Path, folder: Path) -> bool:
    """Whether the path, with links resolved, is in the folder.

    Files of the hub's cache may be in its `blobs`, to which the snapshot folders link.
    """
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(folder.parent.parent / "blobs")
    return any(is_inside(path, home) for home in homes)


def check_model(folder: Path) -> None:
    """Raise ModelUnusable unless the model's files are its own and of a sensible size."""
    weights = _weights(folder)
    if len(weights) > (most_files := limits.CHECKPOINT_FILES):
        raise ModelUnusable(
            f"The model's folder {folder.name!r} has more than {most_files:,} files of weights. "
            "Download the model again."
        )
    for path in chain(weights, map(folder.joinpath, MOST_BYTES)):
        if os.path.lexists(path):
            _check_file(path, folder)


def _check_file(path: Path, folder: Path) -> None:
    name = path.relative_to(folder).as_posix()

    def unusable(what: str) -> ModelUnusable:
        return ModelUnusable(f"{name} in the model's folder {folder.name!r} {what}.")

    if not is_own(path, folder):
        raise unusable("is a link that leads out of the folder. Copy the file into it")
    if not path.is_file():
        raise unusable("is not a file. Download the model again")
    if name in MOST_BYTES and path.stat().st_size > MOST_BYTES[name]:
        raise unusable(f"is larger than {MOST_BYTES[name]:,} bytes. Download the model again")
