"""Encoders: models whose tokens see the whole text at once. They make embeddings of texts, or rank
them, and generate none. mlx-lm has none of them; the worker's own are in `worker/encoders.py`."""

from collections.abc import Mapping
from typing import Any, Literal

Architecture = Literal["bert", "roberta", "modernbert"]

ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "modernbert": "modernbert",
}
"""The implementation of each model type."""

DEFAULT_POSITIONS: Mapping[Architecture | None, int] = {
    "bert": 512,
    "roberta": 512,
    "modernbert": 8192,
}

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")

RANKS = "ForSequenceClassification"
"""The end of the class's name of a model that gives a text, or a pair of them, a score."""


def is_encoder(config: Mapping[str, Any]) -> bool:
    return architecture_of(config) is not None


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    name = config.get("model_type")
    return ARCHITECTURES.get(name) if isinstance(name, str) else None


def is_reranker(config: Mapping[str, Any]) -> bool:
    """Whether it is an encoder whose output is one score."""
    listed = config.get("architectures")
    name = listed[0] if isinstance(listed, list) and listed else listed
    return is_encoder(config) and isinstance(name, str) and name.endswith(RANKS)


def labels_of(config: Mapping[str, Any]) -> int:
    """The number of scores a model gives; transformers leaves out the default, two."""
    listed, number = config.get("id2label"), config.get("num_labels")
    if isinstance(listed, dict):
        return len(listed)
    return number if type(number) is int else 2


def positions_of(config: Mapping[str, Any]) -> int:
    """The number of positions a model has; transformers leaves out the default."""
    found = config.get("max_position_embeddings")
    return found if type(found) is int and found > 0 else DEFAULT_POSITIONS[architecture_of(config)]


def context_of(config: Mapping[str, Any]) -> int:
    """The most tokens of a text."""
    return max(1, positions_of(config) - first_position(config))


def first_position(config: Mapping[str, Any]) -> int:
    """The place of the first token: RoBERTa's models count on from their padding token's id."""
    padding = config.get("pad_token_id", 1)
    if architecture_of(config) != "roberta" or type(padding) is not int:
        return 0
    return padding + 1


def why_not_encoded(config: Mapping[str, Any]) -> str | None:
    """Says which feature of an encoder's config.json is not supported here, and what to do; None if
    all are."""
    positions = config.get("position_embedding_type", "absolute")
    names = ("hidden_act", "hidden_activation", "classifier_activation")
    unknown = [config[name] for name in names if config.get(name, "gelu") not in ACTIVATIONS]
    scaling = config.get("rope_scaling")
    if config.get("is_decoder"):
        what = "`is_decoder` is set"
    elif positions not in ("absolute", "sans_pos"):
        what = f"its positions are of the kind {str(positions)[:100]!r}"
    elif unknown:
        what = f"its activation is {str(unknown[0])[:100]!r}"
    elif scaling:
        what = "`rope_scaling` is set"
    elif is_reranker(config) and labels_of(config) != 1:
        what = f"it sorts texts into {labels_of(config)} classes, and ranks none"
    else:
        return None
    return f"{what}. Use another embedding model or reranker."
