from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from mlx_server import limits
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.generation.embeddings import (
    GROUP_ROWS,
    GROUP_TOKENS,
    EmbedRequest,
    InputTokenizer,
    grouped,
    tokenized,
)
from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare
from tests.tiny import ENDOFTEXT, IM_END, tiny_embedder


def test_groups_have_similar_lengths_and_a_bounded_size() -> None:
    texts = [[5] * (1 + 37 * number % 900) for number in range(200)]
    groups = list(grouped(texts))
    assert sorted(place for group in groups for place in group) == list(range(200))
    for group in groups:
        lengths = [len(texts[place]) for place in group]
        assert len(group) <= GROUP_ROWS
        assert len(group) * max(lengths) <= GROUP_TOKENS
    ends = [(len(texts[group[0]]), len(texts[group[-1]])) for group in groups]
    assert all(one[1] <= other[0] for one, other in pairwise(ends))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """Its tokenizer ends each text with a special token, as that of Qwen3-Embedding does."""
    folder = tiny_embedder(tmp_path_factory.mktemp("ending"))
    made: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", ENDOFTEXT)]
    )
    made.save(str(folder / "tokenizer.json"))
    return prepare(ModelSpec("m", str(folder), context_length=8), lambda *_: None, upcast=True)


def tokens(prepared: PreparedModel, text: str, prompt: str = "", *, truncate: bool = False) -> Any:
    request = EmbedRequest("m", (text,), truncate=truncate)
    return InputTokenizer(prepared, prompt, request).tokens(text, 0)


def test_special_tokens_follow_a_text_that_is_cut(prepared: PreparedModel) -> None:
    whole = tokens(prepared, "abcdefg")
    assert (len(whole), whole[-1]) == (8, ENDOFTEXT)
    assert tokens(prepared, "abcdefghij" * 10_000, truncate=True) == whole
    assert tokens(prepared, "cdefg", "ab") == whole
    with pytest.raises(ContextTooLong, match="maximum context length is 8 tokens"):
        tokens(prepared, "abcdefgh")


def test_the_end_token_follows_where_the_tokenizer_says_so(prepared: PreparedModel) -> None:
    embedder = prepared.checkpoint.embedder
    assert embedder
    ending = replace(embedder, ends_with_end_token=True)
    checkpoint = replace(prepared.checkpoint, embedder=ending)
    assert tokens(replace(prepared, checkpoint=checkpoint), "a")[-2:] == [ENDOFTEXT, IM_END]


def test_the_tokens_of_all_inputs_are_limited(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EMBEDDED_TOKENS", limits.ANSWERS)  # 16
    assert len(tokenized(prepared, EmbedRequest("m", ((5,) * 8, (5,) * 8)))) == 2
    with pytest.raises(BadRequest, match="no more than 16 tokens in total"):
        tokenized(prepared, EmbedRequest("m", ((5,) * 8, (5,) * 8, (5,))))
