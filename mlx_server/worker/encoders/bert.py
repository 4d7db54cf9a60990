"""BERT, and RoBERTa's models, which differ from it in their positions and their head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_server.checkpoints.encoders import (
    architecture_of,
    first_position,
    labels_of,
    positions_of,
    ranks,
)
from mlx_server.worker.encoders.base import (
    ACTIVATIONS,
    Encoder,
    Layer,
    Mask,
    attended,
    heads_of,
)


@dataclass(frozen=True)
class BertArguments:
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int
    type_vocab_size: int
    layer_norm_eps: float
    activation: str
    first_position: int
    labels: int
    is_roberta: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json. The defaults are those of transformers, which leaves them out of its
        files."""
        return cls(
            hidden_size=config.get("hidden_size", 768),
            intermediate_size=config.get("intermediate_size", 3072),
            num_hidden_layers=config.get("num_hidden_layers", 12),
            num_attention_heads=config.get("num_attention_heads", 12),
            max_position_embeddings=positions_of(config),
            vocab_size=config.get("vocab_size", 30522),
            type_vocab_size=config.get("type_vocab_size", 2),
            layer_norm_eps=config.get("layer_norm_eps", 1e-12),
            activation=config.get("hidden_act", "gelu"),
            first_position=first_position(config),
            labels=labels_of(config) if ranks(config) else 0,
            is_roberta=architecture_of(config) == "roberta",
        )


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
            self._add_head(a)

    def _add_head(self, a: BertArguments) -> None:
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
        self._activation = ACTIVATIONS[a.activation]

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
        made = (self.query(hidden), self.key(hidden), self.value(hidden))
        queries, keys, values = (heads_of(each, self._heads) for each in made)
        return attended(queries, keys, values, mask)


class AddedProjection(nn.Module):
    """A projection that is added to what went into the layer, and normalised."""

    def __init__(self, a: BertArguments, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, a.hidden_size)
        self.LayerNorm = nn.LayerNorm(a.hidden_size, a.layer_norm_eps)

    def __call__(self, found: mx.array, before: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(found) + before)
