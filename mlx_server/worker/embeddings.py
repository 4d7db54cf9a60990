"""Computes the embeddings of texts: the hidden states of their tokens, pooled to a vector each.

The texts of a group begin at the same place and are padded at their ends. A causal model computes
them piece by piece: padding changes nothing before it, and one cache serves the whole group. An
encoder, whose tokens see the whole text, computes a few layers at a time.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_server.engine.messages import Embed, Pooling, padded_tokens
from mlx_server.worker.encoders import Encoder
from mlx_server.worker.encoders.base import Layer, Mask, mean_of
from mlx_server.worker.mlx_lm_internals import make_prompt_cache

Hidden = Generator[None, None, mx.array]
"""Yields after each piece; returns one row of float32 values for each text."""


def encoded(model: Encoder, command: Embed, piece_tokens: Callable[[], int]) -> Hidden:
    """Returns a vector or the scores of each text. See `pooled_texts`."""
    tokens, second, is_text = _padded(command)
    hidden = model.embedded(tokens, second)
    for layers in _pieces(model.passes(tokens.shape[1], is_text), tokens.size, piece_tokens):
        for layer in layers:
            hidden = layer(hidden)
        mx.eval(hidden)
        yield
    hidden = model.finished(hidden)
    if command.scores:
        return model.scores(hidden, is_text).astype(mx.float32)
    return _pooled_by(hidden.astype(mx.float32), command.pooling, is_text)


def _padded(command: Embed) -> tuple[mx.array, mx.array, Mask]:
    """Returns the tokens, which of them belong to a pair's second text, and which are no
    padding."""
    texts = command.inputs
    longest = max(map(len, texts))
    tokens = mx.array([[*text, *[0] * (longest - len(text))] for text in texts])
    places = mx.arange(longest)[None]
    starts = command.second_from or [longest] * len(texts)
    second = places >= mx.array(starts)[:, None]
    if padded_tokens(texts) == sum(map(len, texts)):
        return tokens, second, None
    return tokens, second, places < mx.array([len(text) for text in texts])[:, None]


def _pieces(
    layers: Sequence[Layer], tokens: int, piece_tokens: Callable[[], int]
) -> Iterator[Sequence[Layer]]:
    """Yields groups of layers. Each takes as long as `piece_tokens()` tokens in all layers, or is
    one layer."""
    at = 0
    while at < len(layers):
        end = at + max(1, len(layers) * piece_tokens() // tokens)
        yield layers[at:end]
        at = end


def _pooled_by(hidden: mx.array, pooling: Pooling, is_text: Mask) -> mx.array:
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "mean":
        return mean_of(hidden, is_text)
    if is_text is None:
        return hidden[:, -1]
    last = is_text.sum(axis=1) - 1
    return mx.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


IDLE_PIECE = 512
"""Tokens of all texts together that are computed in one piece while no row decodes."""

SMALLEST_NORM = 1e-12

PooledTexts = Generator[None, None, list[bytes]]


def pooled_texts(
    model: nn.Module, command: Embed, piece_tokens: Callable[[], int], *, alone: bool
) -> PooledTexts:
    """Yields after each piece; returns the vectors as bytes.

    piece_tokens: returns how many tokens the next piece may have. alone: whether texts can't be
    computed together.
    """
    if isinstance(model, Encoder):
        made = yield from encoded(model, command, piece_tokens)
        return _as_bytes(made if command.scores else _finished(made, command))
    groups = [[text] for text in command.inputs] if alone else [command.inputs]
    found: list[bytes] = []
    for group in groups:
        pooled = yield from _pooled(model, group, command.pooling, piece_tokens)
        made = _logits(model, pooled, command.logits_of) if command.logits_of else pooled
        found += _as_bytes(_finished(made, command))
    return found


def _pooled(
    model: nn.Module, texts: list[list[int]], pooling: Pooling, piece_tokens: Callable[[], int]
) -> Generator[None, None, mx.array]:
    """Returns one vector for each text, in the precision of float32."""
    backbone, cache = backbone_of(model), make_prompt_cache(model)
    lengths = mx.array([len(text) for text in texts])[:, None]
    longest = max(map(len, texts))
    padded = mx.array([[*text, *[0] * (longest - len(text))] for text in texts])
    total, at = mx.array(0.0), 0
    while at < longest:
        end = min(longest, at + max(1, piece_tokens() // len(texts)))
        hidden = backbone(padded[:, at:end], cache=cache).astype(mx.float32)
        places = mx.arange(at, end)[None]
        counts = places < lengths if pooling == "mean" else places == lengths - 1
        total = total + mx.where(counts[..., None], hidden, 0).sum(axis=1)
        mx.eval(total, [entry.state for entry in cache])
        at = end
        yield
    return total / lengths if pooling == "mean" else total


def backbone_of(model: nn.Module) -> Any:
    """Returns the part of the model that computes the hidden states, without the output head."""
    backbone = getattr(getattr(model, "language_model", model), "model", None)
    if not isinstance(backbone, nn.Module):
        raise ValueError(f"mlx-lm has no hidden states of {getattr(model, 'model_type', 'it')}")
    return backbone


def _logits(model: nn.Module, pooled: mx.array, tokens: list[int]) -> mx.array:
    head = getattr(model, "lm_head", None) or backbone_of(model).embed_tokens.as_linear
    logits: mx.array = head(pooled)
    return logits[:, mx.array(tokens)]


def _finished(vectors: mx.array, command: Embed) -> mx.array:
    if command.logits_of:
        return vectors
    cut = vectors[:, : command.dimensions]
    if not command.normalize:
        return cut
    return cut / mx.maximum(mx.linalg.norm(cut, axis=-1, keepdims=True), SMALLEST_NORM)


def _as_bytes(vectors: mx.array) -> list[bytes]:
    """Raises ValueError for values that are not finite, which no JSON can have."""
    values = np.asarray(vectors.astype(mx.float32), dtype="<f4")
    if not np.isfinite(values).all():
        raise ValueError("the model computed values that are not numbers; its weights are damaged")
    return [row.tobytes() for row in values]
