"""Chat templates, wherever they are; tests/pool/odd_tokens.py has the places."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.checkpoints.checkpoint import FILES, read_chat_templates

TEXTS = st.sampled_from(["", "x", "default", "tool_use", "name", "template"])
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_any_value_gives_texts(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    found = read_chat_templates(tmp_path_factory.getbasetemp(), {"chat_template": value})
    assert found.keys() <= FILES.keys()
    assert all(isinstance(text, str) and text for text in found.values())


def test_line_ends_are_those_of_unix(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes("\ufeffa\r\nb\rc\né".encode())
    assert read_chat_templates(tmp_path, {}) == {"default": "a\nb\nc\né"}
