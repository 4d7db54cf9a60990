"""The layers of a base model, read from its files before it is loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlx_server import limits
from mlx_server.errors import ModelUnusable
from mlx_server.models.files import check_model, read_json
from mlx_server.models.quantization import quantization_of
from mlx_server.models.weights_files import (
    BadHeader,
    Tensor,
    TensorsHeader,
    read_header_of,
)

DEMO_NAMES = {"demo:smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""The hub ids of the demo models."""

VARIANT = re.compile(
    r"[-_.](?:mlx|gguf|\d+-?bits?|q\d+|fp16|bf16|fp32|f16|f32|mxfp4|dwq|hf|unsloth|bnb)$",
    re.IGNORECASE,
)
"""Suffixes by which the names of one model's conversions differ."""


@dataclass(frozen=True)
class BaseModelShapes:
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Each layer's shape, (out, in) or (experts, out, in), by the layer's path."""
    complete: bool = False
    """Whether the paths are those of mlx-lm's model and none is missing."""
    names: frozenset[str] = frozenset()
    """The plain names by which an adapter's config may refer to the model."""


def read_base_shapes(folder: Path | None, source: str) -> BaseModelShapes:
    """Reads the shapes; layers whose shape the files don't reveal are left out.

    source: the model's `source:` in models.yaml.
    """
    if folder is None:
        return BaseModelShapes(names=frozenset(_names(source)))
    try:
        check_model(folder)
    except ModelUnusable:  # loading the model reports it
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


def _headers(folder: Path) -> list[TensorsHeader]:
    try:
        files = sorted(folder.glob("model*.safetensors"))
        return [read_header_of(file, limits.CHECKPOINT_HEADER_BYTES) for file in files]
    except (BadHeader, OSError):  # loading the model reports it
        return []


class _Bits:
    """The bits per weight of quantised layers, from config.json."""

    def __init__(self, config: Path) -> None:
        try:
            self._found = quantization_of(read_json(config)) or {}
        except ModelUnusable:
            self._found = {}

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
    """The name in a hub id or path, without suffixes of conversions, in lower case."""
    name = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    while (shorter := VARIANT.sub("", name)) != name:
        name = shorter
    return name.lower()
