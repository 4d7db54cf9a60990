"""Model types: those of the installed mlx-lm, and encoders.

mlx-lm's source code is read without an import, since only the engine process may load MLX.
Encoders, whose tokens see the whole text at once, make embeddings of texts or rank them; mlx-lm has
none, and the worker's own are in `worker/encoders.py`.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Literal

CONTEXT = (
    "max_position_embeddings",
    "model_max_length",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "max_context_length",
    "seq_length",
    "n_positions",
    "n_ctx",
    "block_size",
)
"""Names of the context length in configs, the most common first."""

SAME = {
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "lfm2_vl": "lfm2-vl",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "hunyuan_vl": "hunyuan_v1_dense",
    "hunyuan_vl_text": "hunyuan_v1_dense",
}
"""Modules for model types that mlx-lm supports but does not list."""

WRAPPING = (
    "glm4v",
    "glm4v_moe",
    "hunyuan_vl",
    "idefics3",
    "internvl",
    "internvl_chat",
    "kimi_vl",
    "llava",
    "paligemma",
    "smolvlm",
)
"""Model types of which mlx-lm has the text model alone, whose config is within the model's."""

TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which the config of a multimodal model nests that of its text model."""


INSTALL = "pip install --no-deps 'mlx-vlm>=0.7.10,<0.8' 'pillow>=13,<14'"
"""Installs all that is needed: what else mlx-vlm names as its dependencies is not used."""


def module_of(config: Mapping[str, Any]) -> str | None:
    """The module of mlx-lm that implements this model, or None if this version has none."""
    name = config.get("model_type")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,60}", name):
        return None
    if name in WRAPPING and len(nested := [*texts(config)]) > 1:
        return module_of({"model_type": nested[1].get("model_type")})
    remapped = _remapped(config, name)
    return remapped if (_mlx_lm() / "models" / f"{remapped}.py").is_file() else None


def why_unknown(config: Mapping[str, Any]) -> str | None:
    """Why mlx-lm can't load a model with this config.json, and what to do; None if it can."""
    if isinstance(file := config.get("model_file"), str):
        return (
            f"it needs code of its own ({file[:100]}), which mlx-server never runs. Use a "
            "checkpoint of an architecture that mlx-lm supports."
        )
    if is_encoder(config):
        return why_not_encoded(config)
    if module_of(config) or whole_package(config):
        return None
    if "model_type" not in config:
        return "its config.json has no `model_type`. Copy it from the original."
    sees = "vision_config" in config and not find_spec("mlx_vlm")
    return (
        f"mlx-lm {version('mlx-lm')} does not support its model type "
        f"{str(config.get('model_type'))[:100]!r}. Update mlx-server and mlx-lm, or choose another "
        f"model.{f' mlx-vlm may support it: {INSTALL}' * sees}"
    )


SEES = re.compile("vision|vit_|image")
"""Found in names of settings of a model that sees."""

WHOLE = ("get_input_embeddings", "self.language_model", "Processor")
"""What the source of mlx-vlm's packages has if they are chat models that see."""


def whole_package(config: Mapping[str, Any]) -> str | None:
    """The package of mlx-vlm for a model that mlx-lm lacks, if it has a processor of pictures."""
    name, spec = config.get("model_type"), find_spec("mlx_vlm")
    if module_of(config) or not (spec and spec.origin and isinstance(name, str)):
        return None
    if not any(SEES.search(key) for key in config):
        return None
    name = _table("MODEL_REMAPPING", spec.origin).get(name, name)
    folder = Path(spec.origin).parent / "models" / name
    files = folder.glob("*.py") if re.fullmatch(r"\w{1,60}", name) else ()
    source = "".join(file.read_text("utf-8") for file in files)
    return name if all(word in source for word in WHOLE) else None


def texts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config, followed by the configs of text models nested in it."""
    yield config
    for name in TEXT:
        if isinstance(nested := config.get(name), dict):
            yield from texts(nested)


LEFT_OUT = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "vocab_size": 32000,
    "use_qk_norm": False,
    "tie_word_embeddings": False,
}
"""What checkpoints leave out of text models' configs, as transformers has it."""

LEFT_OUT_OF_GEMMA = {
    "gemma": {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
}


def text_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a multimodal model's text model, which older checkpoints do not nest."""
    own = next(islice(texts(config), 1, None), config)
    ties = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    kind = str(own.get("model_type"))
    left: dict[str, Any] = {**LEFT_OUT_OF_GEMMA.get(kind, {})}
    positions = own.get("rope_parameters") or {}
    if "glm4" in kind:
        left["partial_rotary_factor"] = 0.5
    if kind.startswith("hunyuan_vl"):
        left["rope_scaling"] = {"type": "xdrope", "factor": 1.0, **positions}
    return {**LEFT_OUT, **left, **ties, **positions, **own}


def _remapped(config: Mapping[str, Any], name: str) -> str:
    listed = config.get("architectures") or ()
    for architecture in (listed,) if isinstance(listed, str) else listed:
        if remapping := _table("MODEL_ARCHITECTURE_REMAPPING").get((name, architecture)):
            return str(remapping)
    return str({**SAME, **_table("MODEL_REMAPPING")}.get(name, name))


@lru_cache(maxsize=1)
def _mlx_lm() -> Path:
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


PARSING = Lock()
"""CPython 3.11 counts the depth of a tree for all threads together, and raises SystemError if two
parse at once: models are prepared in threads."""


@lru_cache(maxsize=3)
def _table(
    name: Literal["MODEL_ARCHITECTURE_REMAPPING", "MODEL_REMAPPING"], package: str = ""
) -> dict[Any, Any]:
    """A dict that utils.py of a package defines. package: its __init__.py; mlx-lm's by default."""
    folder = Path(package).parent if package else _mlx_lm()
    with PARSING:
        tree = ast.parse((folder / "utils.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            table: dict[Any, Any] = ast.literal_eval(node.value)
            return table
    return {}


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
    count = config.get("max_position_embeddings")
    return count if type(count) is int and count > 0 else DEFAULT_POSITIONS[architecture_of(config)]


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
