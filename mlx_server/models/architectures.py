"""Model types and defaults of the installed mlx-lm, read from its source code without an import,
since only the engine process may load MLX.

Defaults are read from transformers too, because it omits them when it writes config.json.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mlx_server.models.encoders import is_encoder, why_not_encoded

LEAST_DEFAULT = 8192
"""Lower defaults, in tokens, are ignored: they date from a class's first version and apply to no
checkpoint that omits its context length."""

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
}
"""Modules for model types that mlx-lm supports but does not list."""

TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which the config of a multimodal model nests that of its text model."""


def module_of(config: Mapping[str, Any]) -> str | None:
    """The module of mlx-lm that implements this model, or None if this version has none."""
    name = config.get("model_type")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        return None
    remapped = _remapped(config, name)
    return remapped if (_models() / f"{remapped}.py").is_file() else None


def why_unknown(config: Mapping[str, Any]) -> str | None:
    """Why mlx-lm can't load a model with this config.json, and what to do; None if it can."""
    if isinstance(file := config.get("model_file"), str):
        return (
            f"it needs code of its own ({file[:100]}), which mlx-server never runs. Use a "
            "checkpoint of an architecture that mlx-lm supports."
        )
    if is_encoder(config):
        return why_not_encoded(config)
    if module_of(config):
        return None
    if "model_type" not in config:
        return "its config.json has no `model_type`. Copy it from the original."
    return (
        f"mlx-lm {version('mlx-lm')} does not support its model type "
        f"{str(config.get('model_type'))[:100]!r}. Update mlx-server and mlx-lm, or choose another "
        "model."
    )


def default_context(config: Mapping[str, Any]) -> int | None:
    """The context length that applies if config.json has none; None if it is unknown."""
    known = [
        *(found for module in _modules(config) for found in _mlx_lm_defaults(module)),
        *(found for name in _types(config) for found in _transformers_defaults(name)),
    ]
    return max((found for found in known if found >= LEAST_DEFAULT), default=None)


def texts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config, followed by the configs of text models nested in it."""
    yield config
    for name in TEXT:
        if isinstance(nested := config.get(name), dict):
            yield from texts(nested)


def _types(config: Mapping[str, Any]) -> list[str]:
    """Model types of the text model, the innermost one, as its configuration class may have it."""
    named = [part.get("model_type") for part in texts(config)]
    return [
        found for name in named[-1:] if isinstance(name, str) for found in (name, f"{name}_text")
    ]


def _modules(config: Mapping[str, Any]) -> set[str]:
    """Modules of mlx-lm that may have the text model's defaults, which some import from others."""
    named = {module for part in texts(config) if (module := module_of(part))}
    plain = {name.removesuffix("_moe") for name in named}
    return {name for stem in named | plain for name in (stem, f"{stem}_text")}


def _remapped(config: Mapping[str, Any], name: str) -> str:
    listed = config.get("architectures") or ()
    for architecture in (listed,) if isinstance(listed, str) else listed:
        if found := _table("MODEL_ARCHITECTURE_REMAPPING").get((name, architecture)):
            return str(found)
    return str({**SAME, **_table("MODEL_REMAPPING")}.get(name, name))


@lru_cache(maxsize=2)
def _package(name: Literal["mlx_lm", "transformers"]) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _models() -> Path:
    return _package("mlx_lm") / "models"


@lru_cache(maxsize=2)
def _table(
    name: Literal["MODEL_ARCHITECTURE_REMAPPING", "MODEL_REMAPPING"],
) -> dict[Any, Any]:
    """A dict that mlx-lm's utils.py defines."""
    for node in _parsed(_package("mlx_lm") / "utils.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            table: dict[Any, Any] = ast.literal_eval(node.value)
            return table
    return {}


@lru_cache(maxsize=64)
def _mlx_lm_defaults(module: str) -> list[int]:
    file = _models() / f"{module}.py"
    return list(_defaults(file)) if file.is_file() else []


@lru_cache(maxsize=64)
def _transformers_defaults(model_type: str) -> list[int]:
    """Defaults of the configuration class that has this model type."""
    folder = _package("transformers") / "models"
    stems = {model_type, model_type.removesuffix("_text"), model_type.removesuffix("_moe_text")}
    files = [file for stem in stems for file in (folder / stem).glob("configuration_*.py")]
    return [found for file in files for found in _defaults(file, model_type)]


def _defaults(file: Path, model_type: str | None = None) -> Iterator[int]:
    for node in _parsed(file).body:
        if isinstance(node, ast.ClassDef):
            values = dict(_assigned(node))
            if model_type is None or values.get("model_type") == model_type:
                yield from (v for name in CONTEXT if type(v := values.get(name)) is int)


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Constants that a class assigns in its body or, in older ones, as defaults of `__init__`."""
    for line in node.body:
        match line:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                yield name, value
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                yield name, value
            case ast.FunctionDef(name="__init__", args=args):
                for arg, default in zip(args.args[::-1], args.defaults[::-1], strict=False):
                    if isinstance(default, ast.Constant):
                        yield arg.arg, default.value


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"), str(file))
