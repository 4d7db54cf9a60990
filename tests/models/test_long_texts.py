"""A long text that is tokenised in pieces gives the tokens of the whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from mlx_server.models import tokenizer as module
from mlx_server.models.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

ALPHABET = [
    *("a", " ", "  ", "\n", "\n\n", "\r\n", "'", "'ll", "1", "<", "|>", "é", "e\u0301", "🙂"),
    *("\u200d", "\u3000", "\x85", "\x80", "\ufdd0", "aaaa", "the", "Hello", "日本"),
]
"""What tokenizers join across a place where a text might be cut, and characters of marks."""

texts = st.lists(st.sampled_from(ALPHABET), min_size=100, max_size=300).map("".join)


def byte_level() -> tokenizers.Tokenizer:
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    joined = ["aa", "aaaa", "Ġa", "ĠĠ", "ĊĊ", "th", "the", "Ġthe"]
    vocabulary = {**letters, **{token: len(letters) + i for i, token in enumerate(joined)}}
    merges = [
        *(("a", "a"), ("aa", "aa"), ("Ġ", "a"), ("Ġ", "Ġ"), ("Ċ", "Ċ")),
        *(("t", "h"), ("th", "e"), ("Ġ", "the")),
    ]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def sentence_piece() -> tokenizers.Tokenizer:
    pieces = ["▁", "a", "aa", "▁a", "▁▁", "t", "h", "e", "th", "the", "▁the"]
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocabulary |= {piece: 257 + i for i, piece in enumerate(pieces)}
    merges = [("a", "a"), ("▁", "a"), ("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the")]
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace()
    return made


@pytest.fixture(scope="module", params=[byte_level, sentence_piece, "tiny"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_path: Path
) -> Tokenizer:
    if request.param == "tiny":
        return Tokenizer(tiny_path / "tokenizer.json")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    request.param().save(str(path))
    return Tokenizer(path)


@pytest.fixture(scope="module", autouse=True)
def _short_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "WINDOW", 64)
        patched.setattr(module, "AROUND", 32)
        yield


@settings(max_examples=25, deadline=None)
@given(text=texts)
def test_pieces_give_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode_within(text, None).tolist() == tokenizer.encode_as_spelled(text)
    assert tokenizer.encode_prompt(text, 10**9) == tokenizer.encode(text, add_special_tokens=True)
