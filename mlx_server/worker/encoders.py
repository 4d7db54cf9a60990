"""Embeddings of texts: the hidden states of their tokens, pooled to a vector each.

The texts of a group begin at the same place and are padded at their ends. A causal model computes
them piece by piece: padding changes nothing before it, and one cache serves the whole group. An
encoder, whose tokens see the whole text, computes a few layers at a time. mlx-lm has no encoders,
so they are here, under the names that their weights have in the checkpoints.
"""

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_server.engine.messages import Embed, Pooling, padded_tokens
from mlx_server.models.architectures import (
    architecture_of,
    first_position,
    is_reranker,
    labels_of,
    positions_of,
)
from mlx_server.worker.mlx_lm_internals import BaseModelArgs, make_prompt_cache

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
        modules = {name for name, _ in tree_flatten(self.leaf_modules(), is_leaf=is_module)}
        named = {_plain(name): array for name, array in weights.items()}
        return {name: a for name, a in named.items() if name.rpartition(".")[0] in modules}

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
    attention = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=width**-0.5, mask=mask
    )
    return attention.swapaxes(1, 2).reshape(rows, tokens, -1)


def mean_of(hidden: mx.array, is_text: Mask) -> mx.array:
    if is_text is None:
        return hidden.mean(axis=1)
    total = mx.where(is_text[..., None], hidden, 0).sum(axis=1)
    return total / is_text.sum(axis=1, keepdims=True)


@dataclass
class BertArguments(BaseModelArgs):
    """The defaults are those of transformers, which leaves them out of its files."""

    max_position_embeddings: int
    first_position: int
    labels: int
    is_roberta: bool
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    vocab_size: int = 30522
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        own = {
            "max_position_embeddings": positions_of(config),
            "first_position": first_position(config),
            "labels": labels_of(config) if is_reranker(config) else 0,
            "is_roberta": architecture_of(config) == "roberta",
        }
        return super().from_dict({**config, **own})


class Bert(Encoder):
    def __init__(self, arguments: BertArguments) -> None:
        super().__init__()
        a = arguments
        self.vocabulary, self.labels = a.vocab_size, a.labels
        self._first_position = a.first_position
        self.longest = a.max_position_embeddings - a.first_position
        self._is_roberta = a.is_roberta
        self.embeddings = {
            "word_embeddings": nn.Embedding(a.vocab_size, a.hidden_size),
            "position_embeddings": nn.Embedding(a.max_position_embeddings, a.hidden_size),
            "token_type_embeddings": nn.Embedding(a.type_vocab_size, a.hidden_size),
            "LayerNorm": nn.LayerNorm(a.hidden_size, a.layer_norm_eps),
        }
        self.encoder = {"layer": [BertLayer(a) for _ in range(a.num_hidden_layers)]}
        if a.labels:
            dense, out = nn.Linear(a.hidden_size, a.hidden_size), nn.Linear(a.hidden_size, a.labels)
            if a.is_roberta:
                self.classifier: Any = {"dense": dense, "out_proj": out}
            else:
                self.pooler, self.classifier = {"dense": dense}, out

    def embedded(self, tokens: mx.array, second: mx.array) -> mx.array:
        parts = self.embeddings
        positions = mx.arange(tokens.shape[1]) + self._first_position
        types = parts["token_type_embeddings"]
        kinds = second.astype(mx.int32) if types.weight.shape[0] > 1 else mx.zeros_like(tokens)
        words = parts["word_embeddings"](tokens)
        return parts["LayerNorm"](words + parts["position_embeddings"](positions) + types(kinds))

    def passes(self, tokens: int, is_text: Mask) -> Sequence[Layer]:
        mask = None if is_text is None else is_text[:, None, None]
        return [partial(layer, mask=mask) for layer in self.encoder["layer"]]

    def scores(self, hidden: mx.array, is_text: Mask) -> mx.array:
        first = hidden[:, 0]
        if self._is_roberta:
            return self.classifier["out_proj"](mx.tanh(self.classifier["dense"](first)))
        return self.classifier(mx.tanh(self.pooler["dense"](first)))


class BertLayer(nn.Module):
    def __init__(self, a: BertArguments) -> None:
        super().__init__()
        self.attention: dict[str, Any] = {
            "self": SelfAttention(a),
            "output": AddedProjection(a, a.hidden_size),
        }
        self.intermediate = {"dense": nn.Linear(a.hidden_size, a.intermediate_size)}
        self.output = AddedProjection(a, a.intermediate_size)
        self._activation = ACTIVATIONS[a.hidden_act]

    def __call__(self, hidden: mx.array, mask: Mask) -> mx.array:
        seen = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        return self.output(self._activation(self.intermediate["dense"](seen)), seen)


class SelfAttention(nn.Module):
    def __init__(self, a: BertArguments) -> None:
        super().__init__()
        self._heads = a.num_attention_heads
        self.query = nn.Linear(a.hidden_size, a.hidden_size)
        self.key = nn.Linear(a.hidden_size, a.hidden_size)
        self.value = nn.Linear(a.hidden_size, a.hidden_size)

    def __call__(self, hidden: mx.array, mask: Mask) -> mx.array:
        projected = (self.query(hidden), self.key(hidden), self.value(hidden))
        queries, keys, values = (heads_of(each, self._heads) for each in projected)
        return attended(queries, keys, values, mask)


class AddedProjection(nn.Module):
    """A projection that is added to what went into the layer, and normalised."""

    def __init__(self, a: BertArguments, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, a.hidden_size)
        self.LayerNorm = nn.LayerNorm(a.hidden_size, a.layer_norm_eps)

    def __call__(self, found: mx.array, before: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(found) + before)


FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass
class ModernBertArguments(BaseModelArgs):
    max_position_embeddings: int
    kinds: tuple[str, ...]
    """The attention of each layer."""
    thetas: Mapping[str, float]
    """The base of the rotary positions, by the kind of attention."""
    labels: int
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_attention_heads: int = 12
    vocab_size: int = 50368
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_activation: str = "gelu"
    local_attention: int = 128
    """The number of tokens that a layer with a window sees, half of them on each side."""
    classifier_pooling: str = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        layers = config.get("num_hidden_layers", 22)
        every = config.get("global_attn_every_n_layers", 3)
        alternating = [SLIDING if at % every else FULL for at in range(layers)]
        ropes = config.get("rope_parameters") or {}
        older = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
        own = {
            "max_position_embeddings": positions_of(config),
            "kinds": tuple(config.get("layer_types") or alternating),
            "thetas": {
                kind: (ropes.get(kind) or {}).get("rope_theta", config.get(name, default))
                for kind, (name, default) in older.items()
            },
            "labels": labels_of(config) if is_reranker(config) else 0,
        }
        return super().from_dict({**config, **own})

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.hidden_size, self.norm_eps, bias=self.norm_bias)


class ModernBert(Encoder):
    def __init__(self, arguments: ModernBertArguments) -> None:
        super().__init__()
        a = arguments
        self.vocabulary, self.labels = a.vocab_size, a.labels
        self.longest = a.max_position_embeddings
        self._kinds, self._window = a.kinds, a.local_attention // 2
        self._head_pooling = a.classifier_pooling
        self.embeddings = {
            "tok_embeddings": nn.Embedding(a.vocab_size, a.hidden_size),
            "norm": a.norm(),
        }
        self.layers = [ModernBertLayer(a, at) for at in range(len(a.kinds))]
        self.final_norm = a.norm()
        if a.labels:
            dense = nn.Linear(a.hidden_size, a.hidden_size, bias=a.classifier_bias)
            self.head = {"dense": dense, "norm": a.norm()}
            self._head_activation = ACTIVATIONS[a.classifier_activation]
            self.classifier = nn.Linear(a.hidden_size, a.labels)

    def embedded(self, tokens: mx.array, second: mx.array) -> mx.array:
        return self.embeddings["norm"](self.embeddings["tok_embeddings"](tokens))

    def passes(self, tokens: int, is_text: Mask) -> Sequence[Layer]:
        everywhere = None if is_text is None else is_text[:, None, None]
        masks = {FULL: everywhere, SLIDING: self._windows(tokens, everywhere)}
        layers = zip(self.layers, self._kinds, strict=True)
        return [partial(layer, mask=masks[kind]) for layer, kind in layers]

    def _windows(self, tokens: int, everywhere: Mask) -> Mask:
        """Returns the mask of a window. Each token sees at least itself: padding that saw nothing
        would become NaN, which the next layer would multiply with zero."""
        if tokens <= self._window + 1:
            return everywhere
        places = mx.arange(tokens)
        distances = mx.abs(places[:, None] - places[None])
        if everywhere is None:
            return distances <= self._window
        return (distances <= self._window) & everywhere | (distances == 0)

    def finished(self, hidden: mx.array) -> mx.array:
        return self.final_norm(hidden)

    def scores(self, hidden: mx.array, is_text: Mask) -> mx.array:
        pooled = hidden[:, 0] if self._head_pooling == "cls" else mean_of(hidden, is_text)
        features = self.head["norm"](self._head_activation(self.head["dense"](pooled)))
        return self.classifier(features)


class ModernBertLayer(nn.Module):
    def __init__(self, a: ModernBertArguments, at: int) -> None:
        super().__init__()
        self.attn = RotaryAttention(a, a.thetas[a.kinds[at]])
        self.mlp = GatedLayer(a)
        self.mlp_norm = a.norm()
        if at:  # what enters the first layer is normalised already
            self.attn_norm = a.norm()

    def __call__(self, hidden: mx.array, mask: Mask) -> mx.array:
        normed = self.attn_norm(hidden) if "attn_norm" in self else hidden
        hidden = hidden + self.attn(normed, mask)
        return hidden + self.mlp(self.mlp_norm(hidden))


class RotaryAttention(nn.Module):
    def __init__(self, a: ModernBertArguments, theta: float) -> None:
        super().__init__()
        self._heads = a.num_attention_heads
        self.Wqkv = nn.Linear(a.hidden_size, 3 * a.hidden_size, bias=a.attention_bias)
        self.Wo = nn.Linear(a.hidden_size, a.hidden_size, bias=a.attention_bias)
        self._rotated = nn.RoPE(a.hidden_size // a.num_attention_heads, base=theta)

    def __call__(self, hidden: mx.array, mask: Mask) -> mx.array:
        parts = mx.split(self.Wqkv(hidden), 3, axis=-1)
        queries, keys, values = (heads_of(part, self._heads) for part in parts)
        return self.Wo(attended(self._rotated(queries), self._rotated(keys), values, mask))


class GatedLayer(nn.Module):
    def __init__(self, a: ModernBertArguments) -> None:
        super().__init__()
        self.Wi = nn.Linear(a.hidden_size, 2 * a.intermediate_size, bias=a.mlp_bias)
        self.Wo = nn.Linear(a.intermediate_size, a.hidden_size, bias=a.mlp_bias)
        self._activation = ACTIVATIONS[a.hidden_activation]

    def __call__(self, hidden: mx.array) -> mx.array:
        entering, gate = mx.split(self.Wi(hidden), 2, axis=-1)
        return self.Wo(self._activation(entering) * gate)


def encoder_classes(config: dict[str, Any]) -> tuple[type[Encoder], type[Any]]:
    """Returns the classes of the model and of its arguments, as mlx-lm's loader expects them."""
    if architecture_of(config) == "modernbert":
        return ModernBert, ModernBertArguments
    return Bert, BertArguments


Hidden = Generator[None, None, mx.array]
"""Yields after each piece; returns one row of float32 values for each text."""


def encoder_output(model: Encoder, command: Embed, piece_tokens: Callable[[], int]) -> Hidden:
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
        output = yield from encoder_output(model, command, piece_tokens)
        return _as_bytes(output if command.scores else _finished(output, command))
    groups = [[text] for text in command.inputs] if alone else [command.inputs]
    vectors: list[bytes] = []
    for group in groups:
        pooled = yield from _pooled(model, group, command.pooling, piece_tokens)
        output = _logits(model, pooled, command.logits_of) if command.logits_of else pooled
        vectors += _as_bytes(_finished(output, command))
    return vectors


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
