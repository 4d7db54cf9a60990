"""What the installed mlx-lm knows of model types, read from its source: nothing of it is imported,
since only the engine process may hold MLX.

For what config.json leaves out, transformers is asked too: it writes no value that is its own
default.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

LEAST_DEFAULT = 8192
"""Tokens. Lower defaults are those of a class's first days, and of no checkpoint that leaves its
context out."""

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
"""What configs call the tokens of a context, the commonest first."""

SAME = {
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "lfm2_vl": "lfm2-vl",
}
"""Model types that mlx-lm computes but does not list: the module of each."""

TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where a config that is also of images keeps what it says of text."""


def module_of(config: Mapping[str, Any]) -> str | None:
    """The module of mlx-lm that computes this model; None: this version has none."""
    name = config.get("model_type")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        return None
    remapped = _remapped(config, name)
    return remapped if (_models() / f"{remapped}.py").is_file() else None


def why_unknown(config: Mapping[str, Any]) -> str | None:
    """Why mlx-lm can't load a model with this config.json, and what to do; None: it can."""
    if isinstance(file := config.get("model_file"), str):
        return (
            f"it brings code of its own ({file[:100]}), which is never run here. Use a checkpoint "
            "of an architecture that mlx-lm has."
        )
    if module_of(config):
        return None
    return (
        f"its model type {str(config.get('model_type'))[:100]!r} is not one that mlx-lm "
        f"{version('mlx-lm')} can compute. Update mlx-server and mlx-lm, or choose another model."
    )


def default_context(config: Mapping[str, Any]) -> int | None:
    """The tokens that a model takes whose config does not say it."""
    known = [
        *(found for module in _modules(config) for found in _mlx_lm_defaults(module)),
        *(found for name in _types(config) for found in _transformers_defaults(name)),
    ]
    return max((found for found in known if found >= LEAST_DEFAULT), default=None)


def texts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config, and what it nests of a language model."""
    yield config
    for name in TEXT:
        if isinstance(nested := config.get(name), dict):
            yield from texts(nested)


def _types(config: Mapping[str, Any]) -> list[str]:
    """Of the text, whose type is the innermost, as its configuration class may be called."""
    named = [part.get("model_type") for part in texts(config)]
    return [
        found for name in named[-1:] if isinstance(name, str) for found in (name, f"{name}_text")
    ]


def _modules(config: Mapping[str, Any]) -> set[str]:
    """Of mlx-lm: a module may import what it says of text."""
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
    """A dict that stands in mlx-lm's utils.py."""
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
    """Of the class whose model type it is."""
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
    """What a class assigns in its body and, in older ones, as defaults of `__init__`."""
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
