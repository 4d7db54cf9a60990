import struct

import pytest

from mlx_server.errors import ContextTooLong
from mlx_server.generation.rerank import pairs, probability
from mlx_server.pool.prepare import PreparedModel
from tests.pool.preparing import of
from tests.tiny_encoders import BERT, CLS, POSITIONS, SEP, SPECIAL, ranking, tiny_encoder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    folder = tmp_path_factory.mktemp("encoder")
    tiny_encoder(folder, ranking(BERT))
    return of(folder)


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
