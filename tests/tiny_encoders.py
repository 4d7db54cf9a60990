"""Tiny encoders with random weights under the names of transformers, and what they compute, in
numpy: one text at a time, without padding."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

Json = dict[str, Any]
Weights = dict[str, Any]

WIDTH, INNER, HEADS, LAYERS, POSITIONS = 32, 48, 4, 3, 96
PAD, UNKNOWN, CLS, SEP = range(4)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789?.:[]ü"
VOCABULARY = len(SPECIAL) + 2 * len(LETTERS)

SIZES: Json = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
}
BERT: Json = {**SIZES, "model_type": "bert", "architectures": ["BertModel"]}
XLM_R: Json = {
    **SIZES,
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
MODERN: Json = {
    **SIZES,
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 1000.0,
    "local_rope_theta": 100.0,
}
ENCODERS = {"bert": BERT, "xlm_roberta": XLM_R, "modernbert": MODERN}


def ranking(config: Json) -> Json:
    name = config["architectures"][0].removesuffix("Model")
    return {
        **config,
        "architectures": [f"{name}ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
    }


def tiny_encoder(folder: Path, config: Json, *, pooling: str | None = None) -> Weights:
    """Writes a checkpoint; returns its weights, by their names without a prefix.

    pooling: its name in sentence-transformers' files, which are left out if there is none.
    """
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    weights = dict(weights_of(config))
    ranks = config["architectures"][0].endswith("Classification")
    outside = ("classifier.", "head.")
    prefix = {"bert": "bert.", "xlm-roberta": "roberta.", "modernbert": "model."}
    saved = {
        (prefix[config["model_type"]] if ranks and not name.startswith(outside) else "") + name: a
        for name, a in weights.items()
    }
    saved["cls.predictions.bias"] = np.ones(VOCABULARY, "f4")  # a head that nothing needs
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    files: Json = {"config": config, "tokenizer_config": {"cls_token": "[CLS]"}}
    if pooling:
        kinds = ("Transformer", "Pooling", "Normalize")
        files["modules"] = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        files["1_Pooling/config"] = {f"pooling_mode_{pooling}": True}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return weights


def weights_of(config: Json) -> Iterator[tuple[str, Any]]:
    random = np.random.default_rng(7)
    for name, shape in _shapes(config):
        made = random.standard_normal(shape)
        if "norm" in name.lower():
            made = made * 0.1 + name.endswith("weight")
        elif "embed" not in name:
            made = made * (2.0 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
        yield name, made.astype("f4")


def _shapes(config: Json) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The head is there if the class is one for classification."""
    ranks = config["architectures"][0].endswith("Classification")
    of = _modern_shapes if config["model_type"] == "modernbert" else _bert_shapes
    yield from of(config, ranks)


def _bert_shapes(config: Json, ranks: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows in (
        ("word", VOCABULARY),
        ("position", POSITIONS),
        ("token_type", config.get("type_vocab_size", 2)),
    ):
        yield f"embeddings.{name}_embeddings.weight", (rows, WIDTH)
    yield from _pair("embeddings.LayerNorm", (WIDTH,))
    for at in range(LAYERS):
        layer = f"encoder.layer.{at}"
        for name in ("query", "key", "value"):
            yield from _pair(f"{layer}.attention.self.{name}", (WIDTH, WIDTH))
        yield from _pair(f"{layer}.attention.output.dense", (WIDTH, WIDTH))
        yield from _pair(f"{layer}.attention.output.LayerNorm", (WIDTH,))
        yield from _pair(f"{layer}.intermediate.dense", (INNER, WIDTH))
        yield from _pair(f"{layer}.output.dense", (WIDTH, INNER))
        yield from _pair(f"{layer}.output.LayerNorm", (WIDTH,))
    if config["model_type"] == "bert":
        yield from _pair("pooler.dense", (WIDTH, WIDTH))
    if ranks and config["model_type"] == "bert":
        yield from _pair("classifier", (1, WIDTH))
    elif ranks:
        yield from _pair("classifier.dense", (WIDTH, WIDTH))
        yield from _pair("classifier.out_proj", (1, WIDTH))


def _modern_shapes(config: Json, ranks: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embeddings.tok_embeddings.weight", (VOCABULARY, WIDTH)
    yield "embeddings.norm.weight", (WIDTH,)
    for at in range(LAYERS):
        if at:
            yield f"layers.{at}.attn_norm.weight", (WIDTH,)
        yield f"layers.{at}.attn.Wqkv.weight", (3 * WIDTH, WIDTH)
        yield f"layers.{at}.attn.Wo.weight", (WIDTH, WIDTH)
        yield f"layers.{at}.mlp_norm.weight", (WIDTH,)
        yield f"layers.{at}.mlp.Wi.weight", (2 * INNER, WIDTH)
        yield f"layers.{at}.mlp.Wo.weight", (WIDTH, INNER)
    yield "final_norm.weight", (WIDTH,)
    if ranks:
        yield "head.dense.weight", (WIDTH, WIDTH)
        yield "head.norm.weight", (WIDTH,)
        yield from _pair("classifier", (1, WIDTH))


def _pair(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def hidden_states(config: Json, w: Weights, ids: list[int], second_from: int | None = None) -> Any:
    """[tokens, width], after the last layer."""
    if config["model_type"] == "modernbert":
        return _modern(config, w, ids)
    count, is_bert = len(ids), config["model_type"] == "bert"
    eps = config.get("layer_norm_eps", 1e-12)
    kinds = np.arange(count) >= (count if second_from is None else second_from)
    h = w["embeddings.word_embeddings.weight"][ids].astype("f8")
    h = h + w["embeddings.position_embeddings.weight"][np.arange(count) + (0 if is_bert else 2)]
    h = h + w["embeddings.token_type_embeddings.weight"][kinds.astype(int) * is_bert]
    h = _normed(w, "embeddings.LayerNorm", h, eps)
    for at in range(LAYERS):
        layer = f"encoder.layer.{at}"
        q, k, v = (_linear(w, f"{layer}.attention.self.{n}", h) for n in ("query", "key", "value"))
        seen = _linear(w, f"{layer}.attention.output.dense", _attention(q, k, v))
        h = _normed(w, f"{layer}.attention.output.LayerNorm", seen + h, eps)
        made = _linear(
            w, f"{layer}.output.dense", _gelu(_linear(w, f"{layer}.intermediate.dense", h))
        )
        h = _normed(w, f"{layer}.output.LayerNorm", made + h, eps)
    return h


def _modern(config: Json, w: Weights, ids: list[int]) -> Any:
    h = _normed(w, "embeddings.norm", w["embeddings.tok_embeddings.weight"][ids].astype("f8"), 1e-5)
    places = np.arange(len(ids))
    is_near = abs(places[:, None] - places[None]) <= config["local_attention"] // 2
    for at in range(LAYERS):
        slides = at % config["global_attn_every_n_layers"] > 0
        theta = config["local_rope_theta" if slides else "global_rope_theta"]
        entering = _normed(w, f"layers.{at}.attn_norm", h, 1e-5) if at else h
        q, k, v = np.split(_linear(w, f"layers.{at}.attn.Wqkv", entering), 3, axis=-1)
        q, k = _rotated(q, theta), _rotated(k, theta)
        h = h + _linear(w, f"layers.{at}.attn.Wo", _attention(q, k, v, is_near if slides else None))
        wide = _linear(w, f"layers.{at}.mlp.Wi", _normed(w, f"layers.{at}.mlp_norm", h, 1e-5))
        made, gate = np.split(wide, 2, axis=-1)
        h = h + _linear(w, f"layers.{at}.mlp.Wo", _gelu(made) * gate)
    return _normed(w, "final_norm", h, 1e-5)


def score(config: Json, w: Weights, hidden: Any) -> float:
    """From 0 to 1."""
    first = hidden[:1]
    match config["model_type"]:
        case "bert":
            logit = _linear(w, "classifier", np.tanh(_linear(w, "pooler.dense", first)))
        case "modernbert":
            made = _normed(w, "head.norm", _gelu(_linear(w, "head.dense", first)), 1e-5)
            logit = _linear(w, "classifier", made)
        case _:
            made = np.tanh(_linear(w, "classifier.dense", first))
            logit = _linear(w, "classifier.out_proj", made)
    return float(1 / (1 + np.exp(-logit[0, 0])))


def pooled(hidden: Any, pooling: str) -> Any:
    vector = {"cls": hidden[0], "mean": hidden.mean(axis=0), "last": hidden[-1]}[pooling]
    return vector / np.linalg.norm(vector)


def _linear(w: Weights, name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"].T.astype("f8") + w.get(f"{name}.bias", 0)


def _normed(w: Weights, name: str, x: Any, eps: float) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return scaled * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def _gelu(x: Any) -> Any:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def _attention(q: Any, k: Any, v: Any, sees: Any = None) -> Any:
    found = []
    for head in range(HEADS):
        part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        scores = q[:, part] @ k[:, part].T / math.sqrt(WIDTH // HEADS)
        if sees is not None:
            scores = np.where(sees, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, part])
    return np.concatenate(found, axis=-1)


def _rotated(x: Any, theta: float) -> Any:
    """The first half of a head's values with its second, as the real and imaginary part."""
    size = WIDTH // HEADS
    angles = np.arange(len(x))[:, None] * theta ** -(np.arange(size // 2) * 2 / size)
    heads = x.reshape(len(x), HEADS, size)
    turned = (heads[..., : size // 2] + 1j * heads[..., size // 2 :]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1).reshape(len(x), WIDTH)


def _tokenizer() -> Tokenizer:
    """BERT's, with a token for each letter."""
    names = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {name: id for id, name in enumerate(names)}
    made = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=1000))
    made.normalizer = BertNormalizer(strip_accents=False)
    made.pre_tokenizer = BertPreTokenizer()
    made.decoder = WordPieceDecoder()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return made
