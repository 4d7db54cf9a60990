"""The layers of a base model, as its files tell them before it is loaded."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_server import limits
from mlx_server.checkpoints.folder_check import check_model
from mlx_server.checkpoints.safetensors_headers import BadHeader, Header, Tensor, read_header_of
from mlx_server.errors import ModelUnusable

DEMO_NAMES = {"demo:smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""What the demo models are elsewhere."""

VARIANT = re.compile(
    r"[-_.](?:mlx|gguf|\d+-?bits?|q\d+|fp16|bf16|fp32|f16|f32|mxfp4|dwq|hf|unsloth|bnb)$",
    re.IGNORECASE,
)
"""Endings by which the names of conversions of one model differ."""


@dataclass(frozen=True)
class BaseModelShapes:
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By the path of the layer, (out, in) or (experts, out, in)."""
    complete: bool = False
    """The paths are those of mlx-lm's own model, and all of them are here."""
    names: frozenset[str] = frozenset()
    """What an adapter may call it."""


def read_base_shapes(folder: Path | None, source: str) -> BaseModelShapes:
    """source: as models.yaml names it. What the files don't tell is left out."""
    if folder is None:
        return BaseModelShapes(names=frozenset(_names(source)))
    try:
        check_model(folder)
    except ModelUnusable:  # loading the model will say so
        return BaseModelShapes(names=frozenset(_names(source, str(folder))))
    headers = _headers(folder)
    bits = _Bits(folder / "config.json")
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    shapes = {
        name.removesuffix(".weight"): shape
        for name, tensor in tensors.items()
        if name.endswith(".weight") and (shape := _shape(name, tensor, tensors, bits))
    }
    complete = bool(headers) and all(h.metadata.get("format") == "mlx" for h in headers)
    return BaseModelShapes(shapes, complete, frozenset(_names(source, str(folder))))


def _headers(folder: Path) -> list[Header]:
    try:
        files = sorted(folder.glob("model*.safetensors"))
        return [read_header_of(file, limits.CHECKPOINT_HEADER_BYTES.value) for file in files]
    except (BadHeader, OSError):  # loading the model will say so
        return []


class _Bits:
    """Per value of a quantised layer; None: unknown."""

    def __init__(self, config: Path) -> None:
        try:
            found = json.loads(config.read_bytes())["quantization"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            found = {}
        self._found: dict[str, Any] = found if isinstance(found, dict) else {}

    def of(self, layer: str) -> int | None:
        own = self._found.get(layer)
        bits = (own if isinstance(own, dict) else self._found).get("bits")
        return bits if type(bits) is int and 0 < bits <= 32 else None


def _shape(
    name: str, tensor: Tensor, tensors: Mapping[str, Tensor], bits: _Bits
) -> tuple[int, ...] | None:
    layer = name.removesuffix(".weight")
    if len(tensor.shape) not in (2, 3):
        return None
    if f"{layer}.scales" not in tensors:
        return tensor.shape
    if tensor.dtype != "U32" or not (each := bits.of(layer)):
        return None
    return (*tensor.shape[:-1], tensor.shape[-1] * 32 // each)


def _names(*names: str) -> set[str]:
    return {plain_name(DEMO_NAMES.get(name, name)) for name in names} | set(map(plain_name, names))


def plain_name(model: str) -> str:
    """Of the hub id or path of a model, without what tells its conversions apart."""
    name = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    while (shorter := VARIANT.sub("", name)) != name:
        name = shorter
    return name.lower()


def plain_path(layer: str) -> str:
    """Without the outer names, by which checkpoints and mlx-lm's models of them differ."""
    return re.sub(r"^(?:(?:base_model|model|language_model|text_model|transformer)\.)+", "", layer)
