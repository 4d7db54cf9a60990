"""Builds tokenizers from tiktoken's ranked byte tokens, for gpt-oss and Kimi."""

from base64 import b64decode
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from mlx_server.errors import ModelUnusable
from mlx_server.models.files import read_own
from mlx_server.models.tokenizer_file import bytes_to_unicode

KIMI_CLASS = "TikTokenTokenizer"
KIMI_RESERVED = 256
"""Number of ids after the vocabulary that are special tokens."""

_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PIECES = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Splits a text into pieces; no token of Kimi's spans two of them."""


def byte_level_tokenizer(
    ranks: Mapping[bytes, int], pieces: str, special: Iterable[AddedToken]
) -> tokenizers.Tokenizer:
    """The `special` tokens get the ids after the last rank, in their order."""
    names = _names(ranks)
    merges = [
        (names[a], names[b])
        for token in sorted(ranks, key=lambda token: ranks[token])
        for a, b in _halves(token, ranks)
    ]
    return _tokenizer(names, merges, pieces, special)


def quick_tokenizer(
    ranks: Mapping[bytes, int], pieces: str, special: Iterable[AddedToken]
) -> tokenizers.Tokenizer:
    """The same tokens without merges, so that it loads in a fifth of the time: a piece of a text
    that is no token as a whole becomes single bytes."""
    return _tokenizer(_names(ranks), [], pieces, special)


def _names(ranks: Mapping[bytes, int]) -> dict[int, str]:
    """The vocabulary's entries, by id."""
    letters = {byte: letter for letter, byte in bytes_to_unicode().items()}
    return {rank: "".join(map(letters.__getitem__, token)) for token, rank in ranks.items()}


def _tokenizer(
    names: Mapping[int, str],
    merges: list[tuple[str, str]],
    pieces: str,
    special: Iterable[AddedToken],
) -> tokenizers.Tokenizer:
    vocabulary = {name: rank for rank, name in names.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split_into(pieces), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(special))
    return tokenizer


def split_into(pieces: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(tokenizers.Regex(pieces), "isolated")


def kimi_tokenizer(file: Path, tokenizer_config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a tiktoken.model, without the checkpoint's own code. Raises
    ModelUnusable."""
    if tokenizer_config.get("tokenizer_class") != KIMI_CLASS:
        raise ModelUnusable(
            f"This model's only tokenizer file is {file.name}, which is supported for Kimi models "
            "alone. Use a checkpoint with a tokenizer.json."
        )
    ranks = _ranks(file)
    return byte_level_tokenizer(ranks, KIMI_PIECES, _special(len(ranks), tokenizer_config))


def _ranks(file: Path) -> dict[bytes, int]:
    """Reads the file, whose lines are a token's bytes in base64 and its rank."""
    try:
        lines = [line.split() for line in read_own(file).splitlines() if line]
        ranks = {b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ModelUnusable(
            f"{file.name} is damaged ({error}). Download the model again."
        ) from None
    if sorted(ranks.values()) != list(range(len(lines))):
        raise ModelUnusable(
            f"{file.name} is damaged: its ranks leave gaps. Download the model again."
        )
    return ranks


def _special(first: int, tokenizer_config: Mapping[str, Any]) -> list[AddedToken]:
    listed = tokenizer_config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    return [
        _added(listed.get(str(id)), f"<|reserved_token_{id}|>")
        for id in range(first, first + KIMI_RESERVED)
    ]


def _added(entry: Any, name: str) -> AddedToken:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str) or not content:
        return AddedToken(name, special=True, normalized=False)
    return AddedToken(content, special=bool(entry.get("special", True)), normalized=False)


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[int, int]]:
    """The ranks of every two tokens that this one is the concatenation of."""
    pairs = []
    for at in range(1, len(token)):  # a million times for a vocabulary
        if (begin := token[:at]) in ranks and (end := token[at:]) in ranks:
            pairs.append((ranks[begin], ranks[end]))
    pairs.sort()
    return pairs
