"""The answers of `/tokenize`, in vLLM's words."""

from collections.abc import Sequence
from typing import Any

from mlx_server.pool.prepare import PreparedModel


def tokenized(
    prepared: PreparedModel, tokens: Sequence[int], *, with_texts: bool
) -> dict[str, Any]:
    return {
        "count": len(tokens),
        "max_model_len": prepared.context_length,
        "tokens": list(tokens),
        "token_strs": _entries(prepared, tokens) if with_texts else None,
    }


def _entries(prepared: PreparedModel, tokens: Sequence[int]) -> list[str]:
    """The tokens as the vocabulary has them."""
    entry = prepared.checkpoint.tokenizer.entry
    return [entry(token) or "" for token in tokens]
