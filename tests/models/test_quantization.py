"""What config.json says of quantisation, whatever it says; tests/pool/odd_files.py loads it."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.models.files import BITS, MODES, quantization_of, why_not_read

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
