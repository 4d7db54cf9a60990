"""Stacks an adapter's tensors of single experts, as mlx-lm stacks the experts of a checkpoint."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import mlx.core as mx

from mlx_server.errors import AdapterInvalid
from mlx_server.worker.lora.tensors import LoraTensors

ONE_EXPERT = re.compile(r"(.+)\.experts\.(0|[1-9]\d{0,3})\.(\w+)")

BLOCKS = ("switch_mlp", "experts")
"""The names that mlx-lm's models give to all experts of a layer."""

STACKED_AS: Mapping[str, tuple[str, ...]] = {
    "w1": ("gate_proj",),
    "w2": ("down_proj",),
    "w3": ("up_proj",),
    "up_proj": ("up_proj", "fc1"),
    "down_proj": ("down_proj", "fc2"),
}
"""The names in mlx-lm's models of an expert's linears, where they may differ from transformers'."""


def stacked(
    pairs: Mapping[str, LoraTensors], is_layer: Callable[[str], bool]
) -> dict[str, LoraTensors]:
    """Returns the pairs, with one for all experts of a layer in place of one for each expert.

    is_layer: whether the model has a layer of this name.
    """
    found: dict[str, LoraTensors] = {}
    experts: dict[str, dict[int, LoraTensors]] = {}
    for layer, pair in pairs.items():
        of_one = None if is_layer(layer) else ONE_EXPERT.fullmatch(layer)
        whole = next(filter(is_layer, _stacks(*of_one.group(1, 3))), None) if of_one else None
        if of_one is None or whole is None or whole in pairs:
            found[layer] = pair
            continue
        others, number = experts.setdefault(whole, {}), int(of_one[2])
        if number in others:
            raise AdapterInvalid(f"{pair.name} and {others[number].name} are the same layer")
        others[number] = pair
    return found | {layer: _stack(each) for layer, each in experts.items()}


def _stacks(block: str, linear: str) -> list[str]:
    names = STACKED_AS.get(linear, (linear,))
    return [f"{block}.{experts}.{name}" for experts in BLOCKS for name in names]


def _stack(experts: Mapping[int, LoraTensors]) -> LoraTensors:
    pairs = [experts[number] for number in sorted(experts)]
    first = pairs[0]
    if missing := set(range(max(experts))) - experts.keys():
        raise AdapterInvalid(f"{first.name}: the same layer of expert {min(missing)} is missing")
    for pair in pairs:
        if (pair.a.shape, pair.b.shape, pair.scale) != (first.a.shape, first.b.shape, first.scale):
            raise AdapterInvalid(f"{pair.name}: its rank or scale is not that of {first.name}")
    a, b = mx.stack([pair.a for pair in pairs]), mx.stack([pair.b for pair in pairs])
    return replace(first, a=a, b=b)
