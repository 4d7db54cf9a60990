"""A model's tokenizer.json: its own, or a made and cached one if it lacks tokens or is of another
format."""

import hashlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from mlx_server import limits
from mlx_server.errors import ModelUnusable, TokenizerUnavailable, public_message
from mlx_server.models.files import read_optional_json
from mlx_server.models.special_tokens import read_special_tokens
from mlx_server.sandbox.parent import Program, Stopped, WarmProcess
from mlx_server.sources import tokenizer_conversion
from mlx_server.sources.cache import cache_dir
from mlx_server.sources.tokenizer_conversion import (
    OWN,
    TOKENIZERS,
    Conversion,
    ConversionRequest,
    completed,
)
from mlx_server.system.files import read_regular

FORMAT = 1
"""Increase this whenever the written files change, so that files in the cache are made again."""

SEARCHED_BYTES = 1 << 24
"""The most bytes of a tokenizer.json that this process searches for its added tokens, which blocks
every thread for 2 milliseconds a MiB."""

PROGRAM = Program(
    tokenizer_conversion.__file__,
    "converts tokenizers",
    memory=limits.TOKENIZER_MEMORY,
    largest=4 * limits.TOKENIZER_BYTES,
    unavailable=TokenizerUnavailable,
)


def tokenizer_json(folder: Path) -> Path:
    """Returns the path of a tokenizer.json that has the tokens of all small files of a checkpoint.
    Raises ModelUnusable if it can't be made."""
    source = folder / next((name for name in TOKENIZERS if (folder / name).is_file()), OWN)
    config = read_optional_json(folder / "tokenizer_config.json")
    special = read_special_tokens(folder, config)
    try:
        if (size := source.stat().st_size) > limits.TOKENIZER_BYTES:
            raise OSError(f"it has more than {limits.TOKENIZER_BYTES >> 20} MiB")
        content = read_regular(source)
    except OSError as error:
        if source.name == OWN:  # its reader says why
            return source
        raise ModelUnusable(f"{source.name} can't be read: {public_message(error)}.") from None
    is_searched = source.name == OWN and size <= SEARCHED_BYTES
    found: bytes | bytearray | None = completed(content, special) if is_searched else None
    if is_searched and found is None:
        return source
    key = hashlib.sha256(f"{FORMAT} {source.name} {json.dumps(config)} {special}".encode())
    key.update(content)
    made = cache_dir() / "tokenizers" / key.hexdigest()[:32] / OWN
    if not made.is_file():
        if not (found := found or _converted(source)):
            return source
        _keep(found, made)
    return made


def _converted(source: Path) -> bytes | bytearray:
    """The tokenizer.json that another process makes; empty if the source needs no change."""
    seconds = limits.TOKENIZER_SECONDS
    process = WarmProcess(PROGRAM)
    try:
        packed = msgspec.msgpack.encode(ConversionRequest(os.fsencode(source), seconds))
        reply, made = process.ask(bytearray(packed), seconds)
    except Stopped as stopped:
        raise ModelUnusable(
            f"{source.name} can't be converted: the process that does so {stopped}. Download the "
            "model again, or use a checkpoint with a tokenizer.json."
        ) from None
    finally:
        process.end()
    if why := msgspec.msgpack.decode(reply, type=Conversion).error:
        raise ModelUnusable(why)
    return made


def _keep(content: bytes | bytearray, made: Path) -> None:
    """Writes a temporary file and moves it, so that no incomplete file is left."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=made.parent) as folder:
            draft = Path(folder, OWN)
            draft.write_bytes(content)
            os.replace(draft, made)
    except OSError as error:
        raise ModelUnusable(
            f"Can't write the model's converted tokenizer to the cache: {public_message(error)}. "
            "Make the cache writable, or set MLX_SERVER_CACHE to another folder."
        ) from None
