"""Computes the embeddings or the scores of texts with an encoder, a few layers at a time."""

from collections.abc import Callable, Generator, Iterator, Sequence

import mlx.core as mx

from mlx_server.engine.messages import Embed, Pooling, padded_tokens
from mlx_server.worker.encoders import Encoder
from mlx_server.worker.encoders.base import Layer, Mask, mean_of

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
    return _pooled(hidden.astype(mx.float32), command.pooling, is_text)


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


def _pooled(hidden: mx.array, pooling: Pooling, is_text: Mask) -> mx.array:
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "mean":
        return mean_of(hidden, is_text)
    if is_text is None:
        return hidden[:, -1]
    last = is_text.sum(axis=1) - 1
    return mx.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
