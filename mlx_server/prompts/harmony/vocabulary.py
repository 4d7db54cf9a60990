"""gpt-oss's vocabulary, and openai-harmony's encoding loaded from it without any network."""

import hashlib
import logging
import lzma
import os
import time
from binascii import a2b_base64
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from weakref import WeakSet

import tokenizers
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding
from tokenizers import AddedToken, pre_tokenizers

from mlx_server.errors import ModelUnusable, public_message
from mlx_server.models.byte_level import byte_level_tokenizer, quick_tokenizer, split_into
from mlx_server.models.tokenizer import Tokenizer

log = logging.getLogger("mlx_server.families")

SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
ENTRIES_SHA256 = "0fc8da96e9c1e979d83a0ad79129255c04f3d2806273de8cba33bbc584ed23fe"
"""SHA-256 of the vocabulary's tokens as a tokenizer.json spells them, one a line."""
FILE = "o200k_base.tiktoken"
SHIPPED = Path(__file__).parent / "data" / f"{FILE}.xz"
FOLDER_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
"""The environment variable for the folder in which openai-harmony looks for the vocabulary before
it would download it."""

TOKENS = 199_998
NAMED = {
    "<|startoftext|>": 199_998,
    "<|endoftext|>": 199_999,
    "<|return|>": 200_002,
    "<|constrain|>": 200_003,
    "<|channel|>": 200_005,
    "<|start|>": 200_006,
    "<|end|>": 200_007,
    "<|message|>": 200_008,
    "<|call|>": 200_012,
    "<|endofprompt|>": 200_018,
}
SPECIAL = tuple(
    {id: token for token, id in NAMED.items()}.get(id, f"<|reserved_{id}|>")
    for id in range(TOKENS, 200_019)
)

PIECES = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The expression that splits a text into pieces. No token spans two of them."""

_lock = Lock()
_encoding: HarmonyEncoding | None = None
_checked: WeakSet[Tokenizer] = WeakSet()


def encoding() -> HarmonyEncoding:
    global _encoding
    with _lock:
        if _encoding is None:
            with _logged("reading gpt-oss's vocabulary"):
                _encoding = _loaded(shipped())
        return _encoding


def check(tokenizer: Tokenizer) -> None:
    """Raises ModelUnusable unless the token ids are those of Harmony."""
    if tokenizer in _checked:
        return
    same = all(tokenizer.id_of(token) == id for token, id in NAMED.items() if id < 200_014)
    with _logged("comparing the model's vocabulary with gpt-oss's"):
        same = same and hashlib.sha256(entries(tokenizer)).hexdigest() == ENTRIES_SHA256
    if not same:
        raise ModelUnusable(
            "The tokenizer.json of this model does not contain gpt-oss's vocabulary, which Harmony "
            "needs. Download the model again, or use the tokenizer.json of openai/gpt-oss-20b."
        )
    _checked.add(tokenizer)


def shipped() -> bytes:
    try:
        content = lzma.decompress(SHIPPED.read_bytes())
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise ModelUnusable(_missing(str(error))) from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ModelUnusable(_missing("it is not the file that mlx-server ships"))
    return content


def entries(tokenizer: Tokenizer) -> bytes:
    """Returns the vocabulary as the checkpoint's own tokenizer has it, without its special
    tokens."""
    return "\n".join(tokenizer.entry(id) or "" for id in range(TOKENS)).encode()


@cache
def real_tokenizer() -> tokenizers.Tokenizer:
    """Returns the tokenizer of the gpt-oss checkpoints."""
    return byte_level_tokenizer(_ranks(), PIECES, _special_tokens())


@cache
def replay_tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer of the same tokens for replay models, which loads faster."""
    return quick_tokenizer(_ranks(), PIECES, _special_tokens())


def _ranks() -> dict[bytes, int]:
    tokens = (line.split() for line in shipped().splitlines())
    return {a2b_base64(token): int(rank) for token, rank in tokens}


def _special_tokens() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in SPECIAL]


def splitter() -> pre_tokenizers.Split:
    return split_into(PIECES)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Logs the start and the duration of work that delays a first request by seconds."""
    log.info("%s", what)
    began = time.monotonic()
    yield
    log.info("%s took %.1f s", what, time.monotonic() - began)


def _loaded(vocabulary: bytes) -> HarmonyEncoding:
    try:
        with TemporaryDirectory() as folder, _encodings_folder(folder):
            (Path(folder) / FILE).write_bytes(vocabulary)
            return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except OSError as error:
        raise ModelUnusable(
            f"gpt-oss's vocabulary could not be unpacked: {public_message(error)}. Free space in "
            "the folder for temporary files, or set TMPDIR to another folder."
        ) from None


@contextmanager
def _encodings_folder(folder: str) -> Iterator[None]:
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = before


def _missing(why: str) -> str:
    return (
        f"The vocabulary of gpt-oss, {SHIPPED}, can't be used: {why}. It is part of the package: "
        "install mlx-server again."
    )
