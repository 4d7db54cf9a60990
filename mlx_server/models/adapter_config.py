"""Reads adapter_config.json, mlx-lm's and PEFT's, and refuses settings that can't be served."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mlx_server import limits
from mlx_server.errors import AdapterInvalid
from mlx_server.models.files import other_kind

CONFIG = "adapter_config.json"
MLX_WEIGHTS = "adapters.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"
LARGEST = 1e6
"""The bound on scales and alphas, far above any that is in use."""

WRAPPERS = "_orig_mod|_fsdp_wrapped_module|module"
"""What torch.compile, FSDP and DDP put before the names of a model's layers."""

OUTER_NAMES = re.compile(
    rf"(?>(?:base_model|model|language_model|text_model|transformer|{WRAPPERS})\.)++"
)

PEFT_EXTRAS = (
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "megatron_config",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""PEFT's settings that train more than low-rank pairs or store them in another layout."""

CHANGES_BASE = re.compile("pissa|olora|corda|loftq|lora_ga", re.IGNORECASE)
"""Ways in which PEFT begins a training and which take a part out of the base model's weights. One
that was saved for the unchanged weights has another value."""

Kind = Literal["lora", "dora"]
Format = Literal["mlx", "peft"]

TENSORS = {
    "mlx": re.compile(r"(.+)\.(lora_a|lora_b|m)"),
    "peft": re.compile(
        r"(?:base_model\.model\.)?(.+)\."
        r"(?:lora_(?:embedding_)?(?=[ABm])|(?=base_layer\.weight$))(A|B|magnitude_vector|base_layer)"
        r"(?:\.(?!weight$)\w+)?(?:\.weight)?"  # the name that the training gave it
    ),
}
"""The name of a tensor: its layer, and its role there. With the pair of an embedding or a head PEFT
saves the layer's own weight, as `base_layer`, which training leaves as it is in the model."""
PARTS = {"A": "lora_a", "B": "lora_b", "magnitude_vector": "m"}
"""mlx-lm's names of PEFT's roles."""

LAYER_NAME = re.compile(r"\^?[\w.\\]+\$?")


@dataclass(frozen=True)
class AdapterConfig:
    format: Format
    kind: Kind
    base: str | None
    """The model that it was trained on; None if the config does not name it."""
    rank: int | None
    """The rank of all layers; None if it differs between layers."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All that the file has."""

    def scale(self, layer: str, rank: int) -> float:
        """The factor of the layer's pair."""
        if self.format == "mlx":
            return float(self.settings["lora_parameters"]["scale"])
        dots = [at for at, letter in enumerate(layer) if letter == "."]
        names = [f"^{layer}", layer, *(layer[at + 1 :] for at in dots)]
        fitting = [self._alphas[name] for name in names if name in self._alphas]
        alpha = min(fitting)[1] if fitting else self.settings["lora_alpha"]
        return float(alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank))

    @cached_property
    def _alphas(self) -> dict[str, tuple[int, float]]:
        """The layers' own alphas, with their places: the first that fits a layer counts."""
        alphas: dict[str, tuple[int, float]] = {}
        for place, (key, alpha) in enumerate((self.settings.get("alpha_pattern") or {}).items()):
            alphas.setdefault(key.removesuffix("$").replace("\\.", "."), (place, alpha))
        return alphas


class Misfit(Exception):
    """What is wrong with an adapter: the rest of a sentence about it, and a remedy."""


def read_config(folder: Path, text: bytes) -> AdapterConfig:
    """text: the file's content. Raises AdapterInvalid."""
    try:
        return _config(folder, text)
    except Misfit as misfit:
        raise invalid(folder, misfit) from None


def _config(folder: Path, text: bytes) -> AdapterConfig:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        what = other_kind(text) or "is not JSON. Copy it again"
        raise Misfit(f"is damaged: {CONFIG} {what}") from None
    if not isinstance(config, dict):
        raise _config_error("should be a JSON object")
    format = format_of(folder, config)
    peft = format == "peft"
    base = (not peft and config.get("model")) or config.get("base_model_name_or_path")
    return AdapterConfig(
        format=format,
        kind=_peft_kind(config) if peft else _mlx_kind(config),
        base=base[-limits.ADAPTER_PATH_CHARACTERS :] if isinstance(base, str) and base else None,
        rank=_one_rank(config, peft),
        settings=config,
    )


def format_of(folder: Path, config: Mapping[str, Any]) -> Format:
    """The format of the weights; some of Unsloth's configs have the settings of both."""
    if "peft_type" not in config:
        return "mlx"
    has_both = config["peft_type"] == "LORA" and isinstance(config.get("lora_parameters"), dict)
    return "mlx" if has_both and (folder / MLX_WEIGHTS).exists() else "peft"


def plain_path(layer: str) -> str:
    """The layer's path without the outer names, in which transformers' classes, checkpoints and
    mlx-lm's models differ."""
    return layer[prefix.end() :] if (prefix := OUTER_NAMES.match(layer)) else layer


def invalid(folder: Path, what: str | Misfit) -> AdapterInvalid:
    return AdapterInvalid(f"Adapter {folder.name!r} {what}.")


def _one_rank(config: Mapping[str, Any], peft: bool) -> int | None:
    if not peft:
        rank: int = config["lora_parameters"]["rank"]
        return rank
    return None if config.get("rank_pattern") else config["r"]


def _config_error(what: str) -> Misfit:
    return Misfit(f"is refused: {CONFIG} {what}")


def _mlx_kind(config: Mapping[str, Any]) -> Kind:
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise Misfit(
            "is a full fine-tune and not LoRA weights. Fuse it into its base with `mlx_lm.fuse` "
            "and serve that as a model"
        )
    if kind not in ("lora", "dora"):
        raise _config_error(
            f"has the fine_tune_type {_shown(kind)}; only lora and dora can be served"
        )
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise _config_error("has no `lora_parameters`: was it saved by mlx-lm?")
    if "scale" not in parameters and "alpha" in parameters:
        raise _config_error("has `alpha` in lora_parameters where mlx-lm's `scale` should be")
    if type(config.get("num_layers", config.get("lora_layers"))) is not int:  # the older name
        raise _config_error("should have a whole number as `num_layers`")
    _rank_in(parameters, "rank")
    _number(parameters, "scale")
    keys = parameters.get("keys")
    if keys is not None and not _are_texts(keys):
        raise _config_error("should have a list of names as `keys`")
    return "dora" if kind == "dora" else "lora"


def _peft_kind(config: Mapping[str, Any]) -> Kind:
    if config["peft_type"] != "LORA":
        raise _config_error(
            f"has the peft_type {_shown(config['peft_type'])}; only LORA can be served"
        )
    for name in PEFT_EXTRAS:
        if config.get(name):
            raise _config_error(f"uses `{name}`, which can't be served. Train without it")
    if CHANGES_BASE.match(str(way := config.get("init_lora_weights"))):
        raise _config_error(
            f"has the init_lora_weights {_shown(way)}: it fits only weights that PEFT has changed "
            "with it. Save it with `path_initial_model_for_weight_conversion`"
        )
    if config.get("bias", "none") != "none":
        raise _config_error("trains biases. Train with `bias` none")
    _rank_in(config, "r")
    _number(config, "lora_alpha")
    targets = config.get("target_modules")
    if targets is not None and not isinstance(targets, str) and not _are_texts(targets):
        raise _config_error("should have names as `target_modules`")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            raise _config_error(f"should have an object as `{name}`")
        for key in pattern:
            if name == "rank_pattern":  # whose expressions don't matter: tensors show their ranks
                _rank_in(pattern, key)
            elif not LAYER_NAME.fullmatch(key):  # a hostile expression could run for ever
                what = f"has {_shown(key)} in `{name}`, which is not the name of a layer"
                raise _config_error(what)
            else:
                _number(pattern, key)
    return "dora" if config.get("use_dora") else "lora"


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _number(config: Mapping[str, Any], name: str) -> None:
    value: Any = config.get(name)
    if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:  # nor a NaN
        raise _config_error(f"should have a number as `{name[:100]}`, but has {_shown(value)}")


def _rank_in(config: Mapping[str, Any], name: str) -> None:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= limits.ADAPTER_RANK:
        what = f"should have a rank from 1 to {limits.ADAPTER_RANK} as `{name[:100]}`, but has "
        raise _config_error(what + _shown(value))


def _shown(value: object) -> str:
    """The value for a message; containers only by type, as they may be too deep to print."""
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value)[:100]
