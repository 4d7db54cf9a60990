"""How a checkpoint makes embeddings of texts, as its sentence-transformers files describe it."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_server.engine.messages import Pooling
from mlx_server.errors import ModelUnusable, public_message
from mlx_server.models.architectures import is_encoder, is_reranker, texts
from mlx_server.models.files import is_own, read_own

log = logging.getLogger("mlx_server.families")

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
PROMPTS, LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"

UNDERSTOOD = {"Transformer", "Pooling", "Normalize"}

POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""The poolings that a causal model can do, by their names in the files."""

OF_ENCODERS: Mapping[str, Pooling] = {**POOLINGS, "cls": "cls", "cls_token": "cls"}
"""The poolings of encoders. A causal model can't use its first token, which sees no other."""


NO_POOLING = (
    "the model's files do not say how its embeddings are pooled: using the mean of all tokens. Add "
    "modules.json and 1_Pooling/config.json of the original model if that is wrong."
)


@dataclass(frozen=True)
class Embedder:
    width: int
    """The number of values of a hidden state; 0 if config.json does not say so."""
    pooling: Pooling = "last"
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that are put before an input, by name."""
    default_prompt: str | None = None
    """The name of the prompt of inputs that name none."""
    max_tokens: int | None = None
    """The longest input that it was trained for; None: its context."""
    ends_with_end_token: bool = False
    """Whether the end-of-sequence token follows each input even if tokenizer.json does not say so.
    """
    unsupported: str = ""
    """The feature of the files that is not supported here; empty if all are."""


def read_embedder(path: Path, config: Mapping[str, Any], *, adds_end: bool) -> Embedder | None:
    """Returns None for a checkpoint without sentence-transformers files that pool, unless it is an
    encoder, which can do nothing else.

    adds_end: the tokenizer's `add_eos_token`. Raises ModelUnusable.
    """
    listed = _json(path, MODULES, [])
    entries = [entry for entry in listed if isinstance(entry, dict)]
    modules = [str(entry.get("type")).rpartition(".")[2] for entry in entries]
    if "Pooling" not in modules:
        return _mean_of(config) if is_encoder(config) and not is_reranker(config) else None
    pooling, unknown = _pooling(_json(path, POOLING, {}), config)
    prompts = _json(path, PROMPTS, {})
    named, default = prompts.get("prompts"), prompts.get("default_prompt_name")
    longest = _json(path, LENGTH, {}).get("max_seq_length")
    return Embedder(
        width=width_of(config),
        pooling=pooling,
        normalizes="Normalize" in modules,
        prompts=_only_texts(named if isinstance(named, dict) else {}),
        default_prompt=default if isinstance(default, str) else None,
        max_tokens=longest if type(longest) is int and longest > 0 else None,
        ends_with_end_token=adds_end,
        unsupported=", ".join(filter(None, (*_others(modules), unknown, _attention(config)))),
    )


def width_of(config: Mapping[str, Any]) -> int:
    widths = (part.get("hidden_size") for part in texts(config))
    return next((width for width in widths if type(width) is int), 0)


def _mean_of(config: Mapping[str, Any]) -> Embedder:
    """The mean, as sentence-transformers takes it for such files, normalised as most files ask
    for."""
    log.warning(NO_POOLING)
    return Embedder(width=width_of(config), pooling="mean")


def _pooling(config: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[Pooling, str]:
    """Returns the pooling, and what can't be done. A copy that lacks the file, as mlx-lm's
    conversions do, pools the last token, as vLLM does with a causal model."""
    if is_encoder(model) and not config:
        log.warning(NO_POOLING)
        return "mean", ""
    known = OF_ENCODERS if is_encoder(model) else POOLINGS
    flags = [name.removeprefix("pooling_mode_") for name, is_on in config.items() if is_on is True]
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [f for f in flags if f != "include_prompt"]
    if config and (len(modes) != 1 or modes[0] not in known):
        return "last", f"pooling by {'+'.join(modes)[:100] or 'no known mode'}"
    pooling = known[modes[0]] if modes else "last"
    if pooling == "mean" and config.get("include_prompt") is False:
        return pooling, "pooling without the prompt"
    return pooling, ""


def _others(modules: list[str]) -> list[str]:
    return [f"the module {name[:100]}" for name in modules if name not in UNDERSTOOD]


def _attention(config: Mapping[str, Any]) -> str:
    """mlx-lm's models are causal: each token sees those before it."""
    if is_encoder(config):
        return ""
    is_causal = config.get("is_causal") is not False and not config.get(
        "use_bidirectional_attention"
    )
    return "" if is_causal else "bidirectional attention"


def _only_texts(prompts: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, text in prompts.items() if isinstance(text, str)}


def _json(folder: Path, name: str, missing: Any) -> Any:
    """The file's content, of the type of `missing`, which is returned if there is no file."""
    path = folder / name
    if not path.is_file() or not is_own(path, folder):
        return missing
    try:
        found = json.loads(read_own(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnusable(f"{name} can't be read: {public_message(error)}.") from None
    if not isinstance(found, type(missing)):
        raise ModelUnusable(f"{name} must contain a JSON {_kind(missing)}.")
    return found


def _kind(value: Any) -> str:
    return "array" if isinstance(value, list) else "object"
