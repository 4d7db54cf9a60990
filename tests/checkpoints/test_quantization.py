"""What config.json says of quantisation, whatever it says; tests/pool/odd_files.py loads it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.checkpoints.quantization import BITS, MODES, quantization_of, why_not_read

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


def test_an_error_of_another_kind_is_not_explained() -> None:
    assert why_not_read({}, "Missing 2 parameters") is None
    assert "no `quantization`" in (why_not_read({}, "Received 2: a.scales") or "")
