"""Families whose replay models have tokenizers of different kinds."""

import pytest

from mlx_server.families import FAMILIES, family_named

SOME_FAMILIES = pytest.mark.parametrize(
    "family", [*FAMILIES[::6], family_named("gpt_oss")], ids=lambda family: family.name
)
"""The one that brings a tokenizer of its own, and some that get one of bytes."""
