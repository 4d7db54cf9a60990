"""ModernBERT: rotary positions, gated layers, and windows in two of three layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_server.checkpoints.encoders import labels_of, positions_of, ranks
from mlx_server.worker.encoders.base import (
    ACTIVATIONS,
    Encoder,
    Layer,
    Mask,
    attended,
    heads_of,
    mean_of,
)

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ModernBertArguments:
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    activation: str
    kinds: tuple[str, ...]
    """The attention of each layer."""
    window: int
    """The number of tokens on each side that a layer with a window sees."""
    thetas: Mapping[str, float]
    """The base of the rotary positions, by the kind of attention."""
    labels: int
    head_pooling: str
    head_bias: bool
    head_activation: str

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json. The defaults are those of transformers, which leaves them out of its
        files."""
        layers = config.get("num_hidden_layers", 22)
        every = config.get("global_attn_every_n_layers", 3)
        alternating = [SLIDING if at % every else FULL for at in range(layers)]
        ropes = config.get("rope_parameters") or {}
        older = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
        return cls(
            hidden_size=config.get("hidden_size", 768),
            intermediate_size=config.get("intermediate_size", 1152),
            num_attention_heads=config.get("num_attention_heads", 12),
            vocab_size=config.get("vocab_size", 50368),
            max_position_embeddings=positions_of(config),
            norm_eps=config.get("norm_eps", 1e-5),
            norm_bias=config.get("norm_bias", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            activation=config.get("hidden_activation", "gelu"),
            kinds=tuple(config.get("layer_types") or alternating),
            window=config.get("local_attention", 128) // 2,
            thetas={
                kind: (ropes.get(kind) or {}).get("rope_theta", config.get(name, default))
                for kind, (name, default) in older.items()
            },
            labels=labels_of(config) if ranks(config) else 0,
            head_pooling=config.get("classifier_pooling", "cls"),
            head_bias=config.get("classifier_bias", False),
            head_activation=config.get("classifier_activation", "gelu"),
        )

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.hidden_size, self.norm_eps, bias=self.norm_bias)


class ModernBert(Encoder):
    def __init__(self, arguments: ModernBertArguments) -> None:
        super().__init__()
        a = arguments
        self.vocabulary, self.labels = a.vocab_size, a.labels
        self.longest = a.max_position_embeddings
        self._kinds, self._window = a.kinds, a.window
        self._head_pooling = a.head_pooling
        self.embeddings = {
            "tok_embeddings": nn.Embedding(a.vocab_size, a.hidden_size),
            "norm": a.norm(),
        }
        self.layers = [ModernBertLayer(a, at) for at in range(len(a.kinds))]
        self.final_norm = a.norm()
        if a.labels:
            dense = nn.Linear(a.hidden_size, a.hidden_size, bias=a.head_bias)
            self.head = {"dense": dense, "norm": a.norm()}
            self._head_activation = ACTIVATIONS[a.head_activation]
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
        made = self.head["norm"](self._head_activation(self.head["dense"](pooled)))
        return self.classifier(made)


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
        self._activation = ACTIVATIONS[a.activation]

    def __call__(self, hidden: mx.array) -> mx.array:
        entering, gate = mx.split(self.Wi(hidden), 2, axis=-1)
        return self.Wo(self._activation(entering) * gate)
