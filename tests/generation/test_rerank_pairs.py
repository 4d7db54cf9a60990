import struct
from pathlib import Path
from typing import Any

import pytest

from mlx_server.errors import ContextTooLong, ModelUnusable
from mlx_server.generation.rerank_pairs import pairs, probability
from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare
from tests.tiny_encoders import BERT, CLS, POSITIONS, SEP, SPECIAL, ranking, tiny_encoder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    folder = tmp_path_factory.mktemp("encoder")
    tiny_encoder(folder, ranking(BERT))
    return of(folder)


def of(folder: Path, **spec: Any) -> PreparedModel:
    return prepare(ModelSpec("m", str(folder), **spec), lambda *_: None, upcast=True)


def test_a_pair_is_what_the_tokenizer_makes_of_it(prepared: PreparedModel) -> None:
    assert prepared.task == "rerank"
    (text,), (start,) = pairs(prepared, "who?", ["me 2"])
    ids = prepared.checkpoint.tokenizer.encode
    assert text == [CLS, *ids("who?"), SEP, *ids("me 2"), SEP]
    assert text[start:] == [*ids("me 2"), SEP], "the first separator belongs to the query"


@pytest.mark.parametrize("text", [*SPECIAL, "a [SEP] b", "[CLS"])
def test_what_a_client_writes_is_text(prepared: PreparedModel, text: str) -> None:
    for query, document in ((text, "d"), ("q", text)):
        (found,), _ = pairs(prepared, query, [document])
        control = [id for id in found if id in (CLS, SEP)]
        assert control == [CLS, SEP, SEP]
        assert "[" in prepared.checkpoint.tokenizer.raw(found).replace("[SEP]", "")


@pytest.mark.parametrize(
    ("query", "document", "param"),
    [("x" * POSITIONS, "d", "query"), ("x" * 50, "y" * 50, "documents[1]")],
)
def test_what_is_too_long_is_named(
    prepared: PreparedModel, query: str, document: str, param: str
) -> None:
    with pytest.raises(ContextTooLong) as refused:
        pairs(prepared, query, ["d", document])
    assert refused.value.param == param


def test_the_longest_pair_fits(prepared: PreparedModel) -> None:
    (text,), _ = pairs(prepared, "x" * 50, ["y" * (POSITIONS - 53)])
    assert len(text) == POSITIONS


@pytest.mark.parametrize(("logit", "wanted"), [(0, 0.5), (1, 0.7310586), (-800, 0), (800, 1)])
def test_a_score_goes_from_0_to_1(logit: float, wanted: float) -> None:
    assert probability(struct.pack("<f", logit)) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("config", "task", "right"),
    [(BERT, "generate", "embed"), (BERT, "rerank", "embed"), (ranking(BERT), "embed", "rerank")],
)
def test_a_task_that_it_was_not_trained_for(
    tmp_path: Path, config: dict[str, Any], task: Any, right: str
) -> None:
    tiny_encoder(tmp_path, config)
    with pytest.raises(ModelUnusable, match=f"Set `task: {right}`"):
        of(tmp_path, task=task)
    assert of(tmp_path).task == right


def test_its_context_can_not_be_raised(tmp_path: Path) -> None:
    tiny_encoder(tmp_path, BERT)
    assert of(tmp_path, context_length=4096).context_length == POSITIONS
    assert of(tmp_path, context_length=20).context_length == 20
