"""Grammars and parsers read the same bytes and the same marks from a tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher
from tokenizers import AddedToken, decoders, models

from mlx_server.families import FAMILIES
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from mlx_server.worker.constrained_decoding.grammar_compiler import fill_bitmask
from mlx_server.worker.constrained_decoding.vocabulary import (
    Bitmask,
    UnusableVocabulary,
    Vocabulary,
)
from tests.tables import cases

SAMPLED = 61
"""Of large vocabularies, one token in so many is compared."""


def agree(folder: Path) -> None:
    """On what is control, and on the bytes of what is not."""
    ours, theirs = Vocabulary(folder, [0]), Tokenizer(folder / "tokenizer.json")
    assert ours.control == theirs.control_tokens
    for id in range(0, len(ours), SAMPLED if len(ours) > 10_000 else 1):
        if id in ours.control:
            assert ours.text[id] == b"\xff[%d]" % id
        elif not theirs.is_silent(id):
            assert ours.text[id] == theirs.bytes_of(id).replace(b"\xff", b"\xfe")
        else:
            assert not ours.text[id]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_vocabularies_of_families(family: Any, tmp_path: Path) -> None:
    agree(replay_checkpoint(tmp_path, family))


def test_the_vocabulary_of_the_demo_model(demo_path: Path) -> None:
    agree(demo_path)


ADDED = [
    AddedToken("<s>", special=True),
    AddedToken("<tool_call>", special=False),
    AddedToken("  ", special=False),
    AddedToken("word", special=False),
    AddedToken("[INST]", special=False),
]


def sentence_piece(folder: Path, decoder: Any, *, unigram: bool) -> Path:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é", "▁▁", "猫"]
    if unigram:
        model: Any = models.Unigram([(p, -1.0) for p in pieces], unk_id=0, byte_fallback=True)
    else:
        model = models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.decoder = decoder
    made.add_tokens(ADDED)
    made.save(str(folder / "tokenizer.json"))
    return folder


REPLACE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@pytest.mark.parametrize("unigram", [False, True], ids=["bpe", "unigram"])
@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(REPLACE),
        decoders.Sequence([*REPLACE, decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
    ids=["gemma", "llama", "metaspace"],
)
def test_sentence_piece(tmp_path: Path, decoder: Any, unigram: bool) -> None:
    agree(sentence_piece(tmp_path, decoder, unigram=unigram))


@pytest.mark.parametrize("vocab", [{"a": 0, "<b>": 1, "c": 2}, {"a": 0, "<b>": 7, "c": 3}])
def test_added_tokens_have_the_ids_that_the_tokenizers_library_gives_them(
    tmp_path: Path, vocab: dict[str, int]
) -> None:
    """Not always those of the file."""
    made = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(t, special=True) for t in ("<x>", "<y>", "<b>", "a", "<x>")])
    content = json.loads(made.to_str())
    content["model"]["vocab"] = vocab
    content["added_tokens"][0]["id"] = 9
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    theirs = Tokenizer(tmp_path / "tokenizer.json").control_tokens
    assert Vocabulary(tmp_path, [0]).control == theirs
    assert len(theirs) == 3


@cases
def test_what_can_t_be_used(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UnusableVocabulary, match=r"tokenizer.json"):
        Vocabulary(tmp_path, [0])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("vocabulary")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    cat = ["çĮ", "çĮ«"]  # two bytes of a character, and all of it
    names = [*letters, *cat, "a" * 3]
    made = tokenizers.Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(t, special=t[1] == "|") for t in ("<|end|>", "<tool>", "<|x|>")])
    made.save(str(folder / "tokenizer.json"))
    ends = [id for t in ("<|end|>", "<|x|>") if (id := made.token_to_id(t)) is not None]
    return Vocabulary(folder, [*ends, 99_999]).build()


def allowed(matcher: LLMatcher, vocabulary: Vocabulary) -> list[int]:
    words: Bitmask = np.zeros_like(vocabulary.ends)
    fill_bitmask(words, matcher, vocabulary)
    return list(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))


def matcher(vocabulary: Vocabulary, start: str) -> LLMatcher:
    source = f'%llguidance {{"no_forcing": true}}\nstart: {start}\n'
    made = LLMatcher(vocabulary.trie, source, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def test_a_control_token_is_named_by_its_id_and_by_nothing_else(vocabulary: Vocabulary) -> None:
    for id, spelling in vocabulary.control.items():
        assert allowed(matcher(vocabulary, f"<[{id}]>"), vocabulary) == [id]
        spelled = matcher(vocabulary, json.dumps(spelling))
        for byte in spelling.encode():
            assert not {*allowed(spelled, vocabulary)} & {*vocabulary.control}
            assert spelled.consume_token(vocabulary.text.index(bytes([byte])))
        assert allowed(spelled, vocabulary) == vocabulary.stop_tokens
    (tool,) = (id for id, spelling in vocabulary.control.items() if spelling == "<tool>")
    text = {*allowed(matcher(vocabulary, f"/(?s:.*)/ <[{tool}]>"), vocabulary)}
    assert text & {*vocabulary.control} == {tool}


def test_parts_of_characters_are_tokens_like_others(vocabulary: Vocabulary) -> None:
    letters = "猫".encode()
    whole, begin, end = map(vocabulary.text.index, (letters, letters[:2], letters[2:]))
    cat = matcher(vocabulary, '"猫" "a"')
    assert {whole, begin} < {*allowed(cat, vocabulary)}
    assert cat.consume_token(begin)
    assert end in allowed(cat, vocabulary)
    assert cat.consume_token(end)
    assert allowed(cat, vocabulary) == [vocabulary.text.index(b"a")]


def test_all_tokens_that_end_an_answer_end_a_grammar(vocabulary: Vocabulary) -> None:
    done = matcher(vocabulary, '"a"')
    assert done.consume_token(vocabulary.text.index(b"a"))
    assert allowed(done, vocabulary) == vocabulary.stop_tokens
    assert len(vocabulary.stop_tokens) == 2
    assert done.consume_token(vocabulary.stop_tokens[1])
    assert allowed(done, vocabulary) == vocabulary.stop_tokens


def test_no_grammar_without_a_token_to_end_with(demo_path: Path) -> None:
    without = Vocabulary(demo_path, []).build()
    assert len(without) == 49_152
    with pytest.raises(UnusableVocabulary, match="no known stop token"):
        _ = without.trie
