"""The parts that all encoders have in common."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

PREFIX = re.compile(r"^(bert|roberta|camembert|model)\.")
"""The prefix of the weights' names if they were saved with a head."""

OLD = {".gamma": ".weight", ".beta": ".bias"}
"""The endings of weights' names in the first checkpoints of BERT, and those used here."""

ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
}

Mask = mx.array | None
"""The tokens that each token sees; None means all."""

Layer = Callable[[mx.array], mx.array]


class Encoder(nn.Module):
    """A text passes `embedded`, then each of `passes`, then `finished`.

    Rows are padded at their ends. What a padding token's hidden state is, is not defined.
    """

    vocabulary: int
    longest: int
    """The most tokens of a text. For a position past the end of its table, MLX would read other
    memory."""
    labels: int
    """The number of scores of `scores`; 0 if the checkpoint has no head for them."""

    def embedded(self, tokens: mx.array, second: mx.array) -> mx.array:
        """tokens: [rows, tokens]. second: which tokens are those of a pair's second text."""
        raise NotImplementedError

    def passes(self, tokens: int, is_text: Mask) -> Sequence[Layer]:
        """Returns the layers for rows of so many tokens. is_text: [rows, tokens], which of them are
        no padding; None: all."""
        raise NotImplementedError

    def finished(self, hidden: mx.array) -> mx.array:
        return hidden

    def scores(self, hidden: mx.array, is_text: Mask) -> mx.array:
        """Returns [rows, labels], from the hidden states that `finished` returned."""
        raise NotImplementedError

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Leaves out heads that are not used here."""
        is_module = nn.Module.is_module
        own = {name for name, _ in tree_flatten(self.leaf_modules(), is_leaf=is_module)}
        named = {_plain(name): array for name, array in weights.items()}
        return {name: a for name, a in named.items() if name.rpartition(".")[0] in own}

    def make_cache(self) -> list[Any]:
        return []

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Returns meaningless logits whose shape a batch reads; requests for tokens are refused."""
        return mx.zeros((*tokens.shape, self.vocabulary))


def _plain(name: str) -> str:
    name = PREFIX.sub("", name)
    for old, new in OLD.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def heads_of(projected: mx.array, heads: int) -> mx.array:
    """Reshapes [rows, tokens, width] to [rows, heads, tokens, width of a head]."""
    rows, tokens, width = projected.shape
    return projected.reshape(rows, tokens, heads, width // heads).swapaxes(1, 2)


def attended(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
    """Computes attention. All arguments are [rows, heads, tokens, width of a head]; the result is
    [rows, tokens, width]."""
    rows, _, tokens, width = queries.shape
    found = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=width**-0.5, mask=mask
    )
    return found.swapaxes(1, 2).reshape(rows, tokens, -1)


def mean_of(hidden: mx.array, is_text: Mask) -> mx.array:
    if is_text is None:
        return hidden.mean(axis=1)
    total = mx.where(is_text[..., None], hidden, 0).sum(axis=1)
    return total / is_text.sum(axis=1, keepdims=True)
