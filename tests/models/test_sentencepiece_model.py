"""A tokenizer.model becomes a tokenizer.json with the ids of SentencePiece's own library."""

from pathlib import Path

import pytest
import sentencepiece

from mlx_server.errors import ModelUnusable
from mlx_server.models.sentencepiece_model import sentencepiece_tokenizer
from tests.models.test_byte_level import texts


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_s_own_ids(tmp_path: Path, kind: str, prefix: bool) -> None:
    files = [Path(__file__), Path(__file__).with_name("test_tokenizer.py")]
    lines = "".join(file.read_text("utf-8") for file in files)
    (tmp_path / "text.txt").write_text(lines)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=600,
        model_type=kind,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = sentencepiece_tokenizer(tmp_path / "tokenizer.model", {})
    for text in texts():
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_tokenizer_model_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"YQ== 0\nYg== 1\n")
    with pytest.raises(ModelUnusable, match="Use a checkpoint with"):
        sentencepiece_tokenizer(tmp_path / "tokenizer.model", {})
