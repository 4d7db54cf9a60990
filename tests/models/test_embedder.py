from pathlib import Path
from typing import Any

import pytest

from mlx_server.errors import ModelUnusable
from mlx_server.models.checkpoint import Embedder, read_embedder
from tests.tables import cases
from tests.tiny import tiny_embedder

CONFIG: dict[str, Any] = {"hidden_size": 64}


def read(path: Path, *, adds_end: bool = False, **config: Any) -> Embedder:
    found = read_embedder(path, {**CONFIG, **config}, adds_end=adds_end)
    assert found
    return found


def of(kinds: list[str]) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]


def test_what_the_files_say(tmp_path: Path) -> None:
    tiny_embedder(tmp_path, sentence_bert_config={"max_seq_length": 512})
    assert read(tmp_path, adds_end=True) == Embedder(
        width=64,
        pooling="last",
        normalizes=True,
        prompts={"query": "Query: ", "document": ""},
        max_tokens=512,
        ends_with_end_token=True,
    )


def test_a_chat_model_has_none(tiny_path: Path, tmp_path: Path) -> None:
    assert read_embedder(tiny_path, CONFIG, adds_end=False) is None
    tiny_embedder(tmp_path, modules=of(["Transformer", "LogitScore"]))
    assert read_embedder(tmp_path, CONFIG, adds_end=False) is None


def test_a_copy_without_the_pooling_pools_the_last_token(tmp_path: Path) -> None:
    """mlx-lm's conversions copy no subfolders."""
    tiny_embedder(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    assert (read(tmp_path).pooling, read(tmp_path).unsupported) == ("last", "")


@cases
def test_poolings(tmp_path: Path, pooling: dict[str, Any], found: str) -> None:
    files: dict[str, Any] = {"1_Pooling/config": pooling}
    tiny_embedder(tmp_path, **files)
    assert (read(tmp_path).pooling, read(tmp_path).unsupported) == (found, "")


@cases
def test_poolings_of_encoders(tmp_path: Path, pooling: dict[str, Any], found: str) -> None:
    files: dict[str, Any] = {"1_Pooling/config": pooling}
    tiny_embedder(tmp_path, **files)
    encoder = read(tmp_path, model_type="bert", is_causal=False)
    assert (encoder.pooling, encoder.unsupported) == (found, "")


def test_an_encoder_whose_files_do_not_say_it_pools_the_mean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = read(tmp_path, model_type="bert")
    assert (encoder.pooling, encoder.normalizes, encoder.width) == ("mean", True, 64)
    tiny_embedder(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    assert read(tmp_path, model_type="bert").pooling == "mean"
    assert caplog.text.count("do not say how its embeddings are pooled") == 2
    ranks = {**CONFIG, "model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    assert read_embedder(tmp_path / "none", ranks, adds_end=False) is None


def test_vectors_that_are_not_normalised(tmp_path: Path) -> None:
    tiny_embedder(tmp_path, modules=of(["Transformer", "Pooling"]))
    assert not read(tmp_path).normalizes


@cases
def test_what_can_not_be_done_is_named(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any], what: str
) -> None:
    tiny_embedder(tmp_path, **files)
    assert read(tmp_path, **config).unsupported == what


@pytest.mark.parametrize("name", ["modules", "1_Pooling/config", "config_sentence_transformers"])
@pytest.mark.parametrize("content", ["{", '"x"', "[" * 100_000, "\udc80"])
def test_damaged_files(tmp_path: Path, name: str, content: str) -> None:
    tiny_embedder(tmp_path)
    path = tmp_path / f"{name}.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelUnusable, match=path.name):
        read(tmp_path)
