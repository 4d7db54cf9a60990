"""A model's tokenizer.json: its own, or a made and cached one if it lacks tokens or is of another
format."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from mlx_server.checkpoints.byte_level import kimi_tokenizer
from mlx_server.checkpoints.file_kind import BOM
from mlx_server.checkpoints.json_file import read_optional_json
from mlx_server.checkpoints.special_tokens import SpecialTokens, read_special_tokens
from mlx_server.checkpoints.tokenizer_file import content_of, file_error
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
    if source.name == OWN and _is_complete(source, special):
        return source
    made = cache_dir() / "tokenizers" / _digest(source, config, special) / OWN
    if not made.is_file():
        _keep(_made(source, config, special), made)
    return made


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    model: msgspec.Raw
    added_tokens: list[_AddedToken] = []


def _is_complete(file: Path, special: SpecialTokens) -> bool:
    """Whether the file can be used as it is. One that can't be read is too: its reader says why."""
    try:
        content = read_regular(file)
        listed = msgspec.json.decode(content, type=_TokenizerFile).added_tokens
    except OSError:
        return True
    except ValueError:
        return not content.startswith(BOM)
    flags = ({**msgspec.structs.asdict(token)} for token in listed)
    return not special.missing_from({it.pop("id"): AddedToken(**it) for it in flags})


def _made(source: Path, config: Mapping[str, Any], special: SpecialTokens) -> tokenizers.Tokenizer:
    if source.name == OWN:
        with file_error():
            made = tokenizers.Tokenizer.from_buffer(content_of(source).removeprefix(BOM))
        made.add_tokens(special.missing_from(made.get_added_tokens_decoder()))
        return made
    made = MADE_FROM[source.name](source, config)
    own = made.get_added_tokens_decoder()
    present = {token.content for token in own.values()}
    further = [t for t in special.missing_from(own) if t.content not in present]
    # found in the text as it is given, as transformers does it for these files
    made.add_tokens([AddedToken(t.content, special=t.special, normalized=False) for t in further])
    return made


def _digest(source: Path, config: Mapping[str, Any], special: SpecialTokens) -> str:
    digest = hashlib.sha256(f"{FORMAT} {source.name} {json.dumps(config)} {special}".encode())
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
