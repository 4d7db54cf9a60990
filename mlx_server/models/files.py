"""The files of a model's folder, which may be malicious: which of them count and may be read, and
what a file is that only has the name of one, since a failed download leaves others in its place.

The sentences continue one that begins with the file's name, and lack the full stop.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mlx_server import limits
from mlx_server.errors import ModelUnusable, public_message
from mlx_server.system.files import open_regular, read_regular

BYTES = 128
"""The bytes of a file's beginning that are looked at."""

BOM = b"\xef\xbb\xbf"

AGAIN = "Download it again"

LFS = "is a Git LFS pointer, not the file itself. Run `git lfs pull` in the folder of the clone"
PAGE = (
    "is a web page, not the file itself. Download it again; if it is gated, accept its terms and "
    "run `hf auth login` first"
)
GGUF = (
    "is a GGUF file. Use a checkpoint in safetensors, or convert the original model with "
    "`mlx_lm.convert`"
)
PICKLE = (
    "is a PyTorch file, which is never opened because such files can run code. Use a checkpoint in "
    "safetensors, or convert the original model with `mlx_lm.convert`"
)

KINDS = (
    (re.compile(rb"version https://git-lfs"), LFS),
    (re.compile(rb"(?i)\s*<(?:!doctype\s+html|html|head|body|!--)"), PAGE),
    (re.compile(rb"\s*<(?:\?xml|[Ee]rror)"), f"is an error that a server sent as XML. {AGAIN}"),
    (re.compile(rb"GGUF"), GGUF),
    (re.compile(rb"\xff\xfe|\xfe\xff"), "is UTF-16 text. Save it as UTF-8"),
    (re.compile(rb"PK\x03\x04|\x80[\x02-\x05]"), PICKLE),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf"), "is an archive. Unpack it"),
    (re.compile(rb"\0+\Z"), f"begins with zeros: its download was not finished. {AGAIN}"),
    (re.compile(rb"\Z"), f"is empty. {AGAIN}"),
)
"""Each kind, by its beginning."""

TEXT = re.compile(rb"[\t\n\r -~]+\Z")


def other_kind(begin: bytes) -> str | None:
    """What a file with this beginning is, and what to do; None if it may be a model's file."""
    begin = begin.removeprefix(BOM)[:BYTES]
    return next((what for pattern, what in KINDS if pattern.match(begin)), None)


def other_than_weights(begin: bytes) -> str | None:
    """Like `other_kind`, for a file that is not text."""
    if (what := other_kind(begin)) or not TEXT.match(begin[:BYTES]):
        return what
    quoted = begin[:BYTES].decode().strip().split("\n")[0][:60]
    return f"is text that begins with {quoted!r}. {AGAIN}"


def read_own(path: Path) -> bytes:
    """The content of a model's file. Raises ModelUnusable if it is something else, or OSError."""
    content = read_regular(path)
    if what := other_kind(content[: BYTES + len(BOM)]):
        raise ModelUnusable(f"{path.name} {what}.")
    return content


log = logging.getLogger("mlx_server.families")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, with or without a byte order mark. Raises ModelUnusable."""
    try:
        found = json.loads(read_own(existing(path)), object_pairs_hook=_made)
    except OSError as error:
        raise ModelUnusable(f"{path.name} can't be read: {public_message(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path.name} is not valid JSON: {error}. {AGAIN}.") from None
    if not isinstance(found, dict):
        raise ModelUnusable(f"{path.name} must contain a JSON object. {AGAIN}.")
    return found


def _made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object as `json` does, but in Python, where other threads get their turn."""
    return dict(pairs)


def read_optional_json(path: Path) -> dict[str, Any]:
    """Like `read_json`; empty if there is no such file, or with a warning if it is damaged."""
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except ModelUnusable as error:
        folder = path.parent.name
        log.warning("%s The model in %r is used without this file.", error.message, folder)
        return {}


def existing(path: Path) -> Path:
    """The path of a file. Raises ModelUnusable if there is none."""
    if not path.is_file():
        raise ModelUnusable(
            f"{path.name} is missing from the model's folder {path.parent.name!r}. "
            "Download the model again, or convert it with `mlx_lm.convert`."
        )
    return path


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
