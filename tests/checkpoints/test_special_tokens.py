"""The tokens of small files, whatever stands in them; tests/pool/odd_tokens.py has what should."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from mlx_server.checkpoints.special_tokens import ADDED, MAP, flags_of, read_special_tokens

ODD_TEXTS = st.sampled_from(["<a>", "<b>", "", "\ud800", "9" * 5000, "7", "²", "content"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ODD_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXTS, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        *("eos_token", "image_token", "extra_special_tokens", "additional_special_tokens"),
        *("added_tokens_decoder", "<a>", "\ud800"),
    ]
)
FILES = st.dictionaries(KEYS, VALUES, max_size=4)


@given(config=FILES, older=FILES, added=FILES)
def test_any_values_give_tokens_or_none(
    tmp_path_factory: pytest.TempPathFactory, config: Any, older: Any, added: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / MAP).write_text(json.dumps(older))
    (folder / ADDED).write_text(json.dumps(added))
    found = read_special_tokens(folder, config)
    missing = found.missing_from({})
    assert all(token.content for token in missing)
    assert found.missing_from(dict(enumerate(missing))) == []
    assert set(found.texts.values()) <= {token.content for token in missing}


def test_flags_are_those_of_the_small_files(tmp_path: Path) -> None:
    listed = {"7": {"content": "<a>", "lstrip": True, "special": False}}
    config = {"added_tokens_decoder": listed, "eos_token": "<b>", "pad_token": "<a>"}
    own = {7: AddedToken("<a>", rstrip=True), 8: AddedToken("<b>", special=True)}
    (token,) = read_special_tokens(tmp_path, config).missing_from(own)
    flags = flags_of(token)
    assert token.content == "<a>"
    assert flags | {"normalized": True} == {
        **dict.fromkeys(("single_word", "rstrip"), False),
        **dict.fromkeys(("lstrip", "normalized", "special"), True),
    }
