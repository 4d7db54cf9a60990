"""What is read of mlx-lm's source without importing it, next to what mlx-lm itself does, and of
config.json; tests/pool/test_odd_folders.jsonl loads it.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.models import checkpoint
from mlx_server.models.architectures import (
    context_of,
    is_reranker,
    labels_of,
    module_of,
    whole_package,
    why_unknown,
)
from mlx_server.models.files import BITS, MODES, quantization_of, why_not_read
from tests.tables import cases
from tests.tiny_encoders import BERT, ENCODERS, MODERN, XLM_R, ranking

GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}


@cases
def test_the_context_of_a_model(config: dict[str, Any], context: int) -> None:
    assert checkpoint._context_length(config) == context


@cases
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rope_that_was_stretched_by_hand(name: str, rope: Any, context: int) -> None:
    config = {"model_type": "qwen3", "max_position_embeddings": 40_960, name: rope}
    assert checkpoint._context_length(config) == context


@cases
def test_the_module_of_a_model(config: dict[str, Any], module: str | None) -> None:
    assert module_of(config) == module
    assert (why_unknown(config) is None) == bool(module or whole_package(config))


def test_mlx_lm_finds_the_same_modules(tmp_path: Path) -> None:
    from mlx_lm.utils import MODEL_REMAPPING, _get_classes

    for name in ["llama", "qwen3_moe", "gemma4_unified", *MODEL_REMAPPING]:
        model_class, _ = _get_classes({"model_type": name})
        assert model_class.__module__ == f"mlx_lm.models.{module_of({'model_type': name})}"


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


@cases
def test_the_longest_text(config: dict[str, Any], tokens: int) -> None:
    """RoBERTa's positions begin after its padding token's."""
    assert context_of(config) == tokens


def test_what_ranks(tmp_path: Path) -> None:
    assert is_reranker(ranking(XLM_R))
    assert not is_reranker(XLM_R)
    assert not is_reranker({**ranking(XLM_R), "model_type": "llama"})
    assert labels_of({"num_labels": 1}) == 1


KEYS = st.sampled_from(["bits", "group_size", "mode", "quant_method", "lm_head"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "x", "affine"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@given(own=VALUES, other=VALUES)
def test_any_values_are_understood_or_named(own: Any, other: Any) -> None:
    config = {"quantization": own, "quantization_config": other}
    settings = quantization_of(config)
    assert settings is None or settings in (own, other)
    said = why_not_read(config, "ValueError: no")
    assert said is None or "`quantization" in said


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mode", MODES)
def test_what_mlx_lm_reads_is_not_at_fault(bits: int, mode: str) -> None:
    settings = {"bits": bits, "group_size": 32, "mode": mode, "lm_head": False}
    assert why_not_read({"quantization": settings}, "ValueError: no") is None


MISMATCHES = {
    "Received 2 parameters not in model: \nvisual.a,\nb.": "2 tensors .*, such as visual.a[.] ",
    "Missing 1 parameters: \nlm_head.weight.": "lack 1 tensors of .*, such as lm_head.weight[.] ",
    "Expected shape (4, 2) but received shape (2,) for parameter lm_head.weight": "tensor "
    r"lm_head.weight has the shape \(2,\), and by config.json it should have \(4, 2\)",
    "__init__() missing 1 required positional argument: 'block_ff_dim'": "lacks 'block_ff_dim'",
}


@pytest.mark.parametrize("error", MISMATCHES)
@pytest.mark.parametrize("config", [{}, {"quantization": {"bits": 4, "group_size": 32}}])
def test_weights_of_another_config_are_named(config: Any, error: str) -> None:
    assert re.search(MISMATCHES[error], why_not_read(config, f"ValueError: {error}") or "")
