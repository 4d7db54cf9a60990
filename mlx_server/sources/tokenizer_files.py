"""A model's tokenizer.json: its own, or a made and cached one if it lacks tokens or is of another
format.

It is also the program of the process that makes one, `tokenizer_files.py MEMORY_BYTES LIFELINE`,
because the library blocks every thread meanwhile.
"""

import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from mlx_server import limits
from mlx_server.errors import ModelUnusable, ServerError, TokenizerUnavailable, public_message
from mlx_server.models.byte_level import kimi_tokenizer
from mlx_server.models.checkpoint import SpecialTokens, flags_of, read_special_tokens
from mlx_server.models.files import BOM, OWN, SENTENCEPIECE, TOKENIZERS, read_optional_json
from mlx_server.sources.cache import cache_dir
from mlx_server.system.files import read_regular, replace_file
from mlx_server.system.sandbox.child import end_with_server, serve, time_limit
from mlx_server.system.sandbox.parent import Program, Stopped, WarmProcess

FORMAT = 1
"""Increase this whenever the written files change, so that files in the cache are made again."""

SEARCHED_BYTES = 1 << 24
"""The most bytes of a tokenizer.json that this process searches for its added tokens, which blocks
every thread for 2 milliseconds a MiB."""

PROGRAM = Program(
    __file__,
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
        content = read_regular(source, limits.TOKENIZER_BYTES)
    except OSError as error:
        if source.name == OWN:  # its reader says why
            return source
        raise ModelUnusable(f"{source.name} can't be read: {public_message(error)}.") from None
    is_searched = source.name == OWN and len(content) <= SEARCHED_BYTES
    new: bytes | bytearray | None = completed(content, special) if is_searched else None
    if is_searched and new is None:
        return source
    key = hashlib.sha256(f"{FORMAT} {source.name} {json.dumps(config)} {special}".encode())
    key.update(content)
    path = cache_dir() / "tokenizers" / key.hexdigest()[:32] / OWN
    if not path.is_file():
        if not (new := new or _converted(source)):
            return source
        _keep(new, path)
    return path


def _converted(source: Path) -> bytes | bytearray:
    """The tokenizer.json that another process makes; empty if the source needs no change."""
    seconds = limits.TOKENIZER_SECONDS
    process = WarmProcess(PROGRAM)
    try:
        packed = msgspec.msgpack.encode(ConversionRequest(os.fsencode(source), seconds))
        reply, content = process.ask(bytearray(packed), seconds)
    except Stopped as stopped:
        raise ModelUnusable(
            f"{source.name} can't be converted: the process that does so {stopped}. Download the "
            "model again, or use a checkpoint with a tokenizer.json."
        ) from None
    finally:
        process.end()
    if why := msgspec.msgpack.decode(reply, type=Conversion).error:
        raise ModelUnusable(why)
    return content


def _keep(content: bytes | bytearray, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, bytes(content))
    except OSError as error:
        raise ModelUnusable(
            f"Can't write the model's converted tokenizer to the cache: {public_message(error)}. "
            "Make the cache writable, or set MLX_SERVER_CACHE to another folder."
        ) from None


# The process that makes one


class ConversionRequest(msgspec.Struct):
    source: bytes
    """The path of a file that is one of TOKENIZERS, as the system has it."""
    seconds: float


class Conversion(msgspec.Struct):
    """A reply, whose payload is the tokenizer.json; it has none if the source is one already."""

    error: str = ""
    """Why there is none, for a ModelUnusable."""


class _ListedToken(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


def completed(content: bytes, special: SpecialTokens) -> bytes | None:
    """A tokenizer.json with the special tokens that it lacks, and without a byte order mark. None
    if it can be used as it is, or can't be used at all."""
    bare = content.removeprefix(BOM)
    try:
        parts = msgspec.json.decode(bare, type=dict[str, msgspec.Raw])
        listed = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[_ListedToken])
    except ValueError:
        return None
    flags = ({**msgspec.structs.asdict(token)} for token in listed)
    own = {flag.pop("id"): AddedToken(**flag) for flag in flags}
    if "model" not in parts or not (further := special.missing_from(own)):
        return None if bare == content else bare
    tokens = {token.content: token for token in listed}
    for token in further:  # the library gives each its next free id, whatever the file says
        id = tokens[token.content].id if token.content in tokens else len(tokens)
        tokens[token.content] = _ListedToken(id, token.content, **flags_of(token))
    parts["added_tokens"] = msgspec.Raw(msgspec.json.encode([*tokens.values()]))
    return msgspec.json.encode(parts)


def _tokenizer(source: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    if source.name != SENTENCEPIECE:
        return kimi_tokenizer(source, config)
    # few models need it, and it takes long to import
    from mlx_server.models.sentencepiece_model import sentencepiece_tokenizer

    return sentencepiece_tokenizer(source, config)


def _with_added_tokens(source: Path, config: Mapping[str, Any], special: SpecialTokens) -> bytes:
    tokenizer = _tokenizer(source, config)
    own = tokenizer.get_added_tokens_decoder()
    present = {token.content for token in own.values()}
    further = [t for t in special.missing_from(own) if t.content not in present]
    # found in the text as it is given, as transformers does it for these files
    added = [AddedToken(t.content, special=t.special, normalized=False) for t in further]
    tokenizer.add_tokens(added)
    return str(tokenizer.to_str()).encode()


def _made(source: Path) -> bytes:
    config = read_optional_json(source.parent / "tokenizer_config.json")
    special = read_special_tokens(source.parent, config)
    if source.name == OWN:
        return completed(read_regular(source), special) or b""
    return _with_added_tokens(source, config, special)


def _answer(frame: bytearray) -> tuple[Conversion, bytes]:
    asked = msgspec.msgpack.decode(frame, type=ConversionRequest)
    try:
        with time_limit(asked.seconds):
            return Conversion(), _made(Path(os.fsdecode(asked.source)))
    except ServerError as error:
        return Conversion(error.message), b""


def main() -> None:
    end_with_server(int(sys.argv[2]))
    serve(socket.socket(fileno=0), _answer)


if __name__ == "__main__":
    main()
