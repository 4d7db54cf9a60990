"""The internals of mlx-lm that the engine uses, which another version may rename or change. They
are checked when the engine starts, so that a mismatch is reported in one sentence."""

import glob
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import requires, version
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_server.models.files import MLX, OTHERS, quantization_of, read_json, read_optional_json

NVIDIA = "hf_quant_config.json"
"""The file in which NVIDIA's exports say how they are quantised."""

SUPPORTED = next(
    (line for line in requires("mlx-local-server") or () if line.startswith("mlx-lm")), ""
)


class WrongMlxLm(ImportError):
    """This version of mlx-lm is not one that the engine works with."""

    def __init__(self, changed: str) -> None:
        super().__init__(
            f"mlx-lm {version('mlx-lm')} is not supported here: {changed}. Run "
            f"`pip install '{SUPPORTED or 'mlx-lm'}'`, or update mlx-server."
        )


try:
    from mlx_lm import utils
    from mlx_lm.generate import GenerationBatch as GenerationBatch
    from mlx_lm.generate import PromptProcessingBatch as PromptProcessingBatch
    from mlx_lm.generate import StopSequences as StopSequences
    from mlx_lm.models.base import BaseModelArgs as BaseModelArgs
    from mlx_lm.models.cache import ArraysCache as ArraysCache
    from mlx_lm.models.cache import BatchKVCache as BatchKVCache
    from mlx_lm.models.cache import BatchRotatingKVCache as BatchRotatingKVCache
    from mlx_lm.models.cache import CacheList as CacheList
    from mlx_lm.models.cache import ChunkedKVCache as ChunkedKVCache
    from mlx_lm.models.cache import KVCache as KVCache
    from mlx_lm.models.cache import QuantizedKVCache as QuantizedKVCache
    from mlx_lm.models.cache import RotatingKVCache as RotatingKVCache
    from mlx_lm.models.cache import create_attention_mask as create_attention_mask
    from mlx_lm.models.cache import make_prompt_cache as make_prompt_cache
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear as QuantizedSwitchLinear
    from mlx_lm.models.switch_layers import SwitchGLU as SwitchGLU
    from mlx_lm.models.switch_layers import SwitchLinear as SwitchLinear
    from mlx_lm.models.switch_layers import SwitchMLP as SwitchMLP
    from mlx_lm.sample_utils import greedy_sampler as greedy_sampler
    from mlx_lm.utils import _decode_tagged_floats as decode_tagged_floats
    from mlx_lm.utils import _get_classes
except ImportError as error:
    raise WrongMlxLm(str(error)) from error

get_classes = _get_classes

SHARDED = (
    *(nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear),
    *(nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear),
)
"""What mlx-lm makes of linear layers that are split over several ranks."""

ROWS = ("samplers", "fallback_sampler", "logits_processors", "stop_sequences", "max_tokens")
ARGUMENTS: dict[Any, tuple[str, ...]] = {
    GenerationBatch: ("model", "uids", "inputs", "prompt_cache", "tokens", *ROWS),
    PromptProcessingBatch: ("model", "uids", "caches", "tokens", "prefill_step_size", *ROWS),
}
"""The constructors' parameters, in the order in which decode_groups.py and batch.py pass them."""

METHODS: dict[Any, tuple[str, ...]] = {
    GenerationBatch: ("_step", "empty", "extend", "extract_cache", "filter", "next"),
    PromptProcessingBatch: ("empty", "extract_cache", "filter", "prompt"),
    KVCache: ("is_trimmable", "trim"),
    StopSequences: ("matcher",),
}


def check_mlx_lm() -> None:
    """Raises WrongMlxLm if a class lacks a method or has other constructor parameters."""
    for kind, names in METHODS.items():
        if gone := [name for name in names if not hasattr(kind, name)]:
            raise WrongMlxLm(f"{kind.__name__} has no {', '.join(gone)}")
    for kind, names in ARGUMENTS.items():
        if (parameters := tuple(signature(kind).parameters)) != names:
            raise WrongMlxLm(f"{kind.__name__} takes {', '.join(parameters)}")


check_mlx_lm()


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model, as the server reads it, with what mlx-lm expects in it."""
    config: dict[str, Any] = decode_tagged_floats(read_json(folder / "config.json"))
    if (quantization := quantization_of(config)) is not None:
        config[MLX] = quantization
    text = config.get("text_config")
    if OTHERS not in config and not (isinstance(text, dict) and OTHERS in text):
        config |= {OTHERS: own} if (own := read_optional_json(folder / NVIDIA)) else {}
    return config


def load_model(
    folder: Path, config: Mapping[str, Any], classes: Callable[[dict[str, Any]], tuple[Any, Any]]
) -> nn.Module:
    """mlx-lm's model, of which no weights are read yet. mlx-lm's own reader of the config takes no
    byte order mark and fails at damaged files that it does not need."""
    theirs = utils.load_config
    utils.load_config = lambda _: {**config}
    try:
        # mlx-lm makes a pattern of the folder's name
        escaped = Path(glob.escape(str(folder)))
        model, _ = utils.load_model(escaped, lazy=True, get_model_classes=classes)
    finally:
        utils.load_config = theirs
    if getattr(model, "model_type", "") == "nemotron_h":
        _mend_nemotron()
    if getattr(model, "model_type", "") == "plamo3":
        model.config.window_size += 1  # of its caches, since its masks show so many tokens
    return model


def _mend_nemotron() -> None:
    """Has its Mamba layers say where rows end. Else a row that is shorter than others in a pass
    loses its state."""
    from mlx_lm.models import nemotron_h

    mixer, update = nemotron_h.NemotronHMamba2Mixer, nemotron_h.ssm_update
    unmended = mixer._ssm

    def _ssm(self: Any, *arrays: Any) -> Any:
        lengths = next((x.lengths for x in arrays if isinstance(x, ArraysCache)), None)
        nemotron_h.ssm_update = partial(update, lengths=lengths)
        try:
            return unmended(self, *arrays)
        finally:
            nemotron_h.ssm_update = update

    if unmended.__module__ == nemotron_h.__name__:
        mixer._ssm = _ssm
