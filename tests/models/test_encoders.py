from pathlib import Path
from typing import Any

import pytest

from mlx_server.models.architectures import context_of, is_reranker, labels_of, why_unknown
from tests.tiny_encoders import BERT, ENCODERS, MODERN, POSITIONS, XLM_R, ranking


@pytest.mark.parametrize("config", [*ENCODERS.values(), *map(ranking, ENCODERS.values())])
def test_they_can_be_served(config: dict[str, Any]) -> None:
    assert why_unknown(config) is None


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({**BERT, "is_decoder": True}, "`is_decoder`"),
        ({**BERT, "position_embedding_type": "relative_key"}, "'relative_key'"),
        ({**BERT, "hidden_act": "mish"}, "'mish'"),
        ({**MODERN, "hidden_activation": 5}, "'5'"),
        ({**ranking(MODERN), "classifier_activation": "mish"}, "'mish'"),
        ({**MODERN, "rope_scaling": {"type": "linear"}}, "`rope_scaling`"),
        ({**ranking(BERT), "id2label": {"0": "a", "1": "b", "2": "c"}}, "3 classes"),
        ({**ranking(BERT), "id2label": None}, "2 classes"),
        ({"model_type": "distilbert"}, "'distilbert'"),
    ],
)
def test_what_can_not_be_done_is_named(config: dict[str, Any], what: str) -> None:
    assert what in (why_unknown(config) or "")


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (BERT, POSITIONS),
        (XLM_R, POSITIONS - 2),
        ({**XLM_R, "max_position_embeddings": 8194}, 8192),
        ({"model_type": "roberta"}, 510),
        ({"model_type": "bert", "max_position_embeddings": "x"}, 512),
        ({"model_type": "modernbert"}, 8192),
        ({"model_type": "roberta", "max_position_embeddings": 1}, 1),
    ],
)
def test_the_longest_text(config: dict[str, Any], tokens: int) -> None:
    """RoBERTa's positions begin after its padding token's."""
    assert context_of(config) == tokens


def test_what_ranks(tmp_path: Path) -> None:
    assert is_reranker(ranking(XLM_R))
    assert not is_reranker(XLM_R)
    assert not is_reranker({**ranking(XLM_R), "model_type": "llama"})
    assert labels_of({"num_labels": 1}) == 1
