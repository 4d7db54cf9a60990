"""A model's tokenizer.json: its own, or a made and cached one if it lacks tokens or is of another
format."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from mlx_server.checkpoints.byte_level import kimi_tokenizer
from mlx_server.checkpoints.file_kind import BOM
from mlx_server.checkpoints.json_file import read_optional_json
from mlx_server.checkpoints.special_tokens import SpecialTokens, flags_of, read_special_tokens
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
    """Returns the path of a tokenizer.json that has the tokens of all small files of a checkpoint.
    Raises ModelUnusable if it can't be made."""
    source = folder / next((name for name in TOKENIZERS if (folder / name).is_file()), OWN)
    config = read_optional_json(folder / "tokenizer_config.json")
    special = read_special_tokens(folder, config)
    try:
        content = read_regular(source)
    except OSError as error:
        if source.name == OWN:  # its reader says why
            return source
        raise ModelUnusable(f"{source.name} can't be read: {public_message(error)}.") from None
    make = partial(_converted, source, config, special)
    if source.name == OWN:
        if (completed := _completed(content, special)) is None:
            return source
        make = partial(bytes, completed)
    key = hashlib.sha256(f"{FORMAT} {source.name} {json.dumps(config)} {special}".encode())
    key.update(content)
    made = cache_dir() / "tokenizers" / key.hexdigest()[:32] / OWN
    if not made.is_file():
        _keep(make(), made)
    return made


class _ListedToken(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


def _completed(content: bytes, special: SpecialTokens) -> bytes | None:
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


def _converted(source: Path, config: Mapping[str, Any], special: SpecialTokens) -> bytes:
    made = MADE_FROM[source.name](source, config)
    own = made.get_added_tokens_decoder()
    present = {token.content for token in own.values()}
    further = [t for t in special.missing_from(own) if t.content not in present]
    # found in the text as it is given, as transformers does it for these files
    made.add_tokens([AddedToken(t.content, special=t.special, normalized=False) for t in further])
    text: str = made.to_str()
    return text.encode()


def _keep(content: bytes, made: Path) -> None:
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
