"""The answers of `/tokenize`, in the words of vLLM and llama.cpp."""

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


def with_pieces(prepared: PreparedModel, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens with their texts. Part of a character is a list of its bytes."""
    return [{"id": token, "piece": _piece(prepared, token)} for token in tokens]


def _piece(prepared: PreparedModel, token: int) -> str | list[int]:
    found = prepared.checkpoint.tokenizer.bytes_of(token)
    try:
        return found.decode()
    except UnicodeDecodeError:
        return list(found)
