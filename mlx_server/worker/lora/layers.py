"""Layers that apply LoRA to some rows of a forward pass and not to others.

A layer that an adapter changes gets another class, in place: its parameters, its path in the model
and all references to it stay the same, and restoring its class removes the change completely.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.worker.lora.slots import AdapterSlots, current_rows
from mlx_server.worker.mlx_lm_internals import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)


class _AdaptedLinear(nn.Module):
    slots: AdapterSlots

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(x)
        rows = self.slots.rows()
        if rows is None:
            return y
        added = self.slots.linear(x, rows)
        dora = self.slots.scaled_by_dora(y - self["bias"] if "bias" in self else y, rows)
        return y + (added if dora is None else added + dora).astype(y.dtype)


class _AdaptedEmbedding(nn.Module):
    slots: AdapterSlots
    head: AdapterSlots
    """The adapters' part where the embedding is also the model's output head."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(x)
        rows = self.slots.rows()
        return y if rows is None else y + self.slots.lookup(x, rows).astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = super().as_linear(x)
        rows = self.head.rows()
        return y if rows is None else y + self.head.linear(x, rows).astype(y.dtype)


class _AdaptedExperts(nn.Module):
    slots: AdapterSlots

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
        rows = self.slots.rows()
        if rows is None:
            return y
        return y + self.slots.experts(x, indices, rows, in_order=sorted_indices).astype(y.dtype)


class _SortingExperts(nn.Module):
    """Repeats the sorting by expert that mlx-lm applies to long inputs, since mlx-lm does not
    expose the order."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        rows = current_rows()
        if rows is None or (rows.only is not None and rows.scale is not None):
            y: mx.array = super().__call__(x, indices)
            return y
        rows.sorted = mx.argsort(indices.flatten()) // (indices.size // len(rows))
        try:
            y = super().__call__(x, indices)
        finally:
            rows.sorted = None
        return y


class AdaptedLinear(_AdaptedLinear, nn.Linear):
    pass


class AdaptedQuantizedLinear(_AdaptedLinear, nn.QuantizedLinear):
    pass


class AdaptedEmbedding(_AdaptedEmbedding, nn.Embedding):
    pass


class AdaptedQuantizedEmbedding(_AdaptedEmbedding, nn.QuantizedEmbedding):
    pass


class AdaptedSwitchLinear(_AdaptedExperts, SwitchLinear):
    pass


class AdaptedQuantizedSwitchLinear(_AdaptedExperts, QuantizedSwitchLinear):
    pass


class AdaptedSwitchGLU(_SortingExperts, SwitchGLU):
    pass


class AdaptedSwitchMLP(_SortingExperts, SwitchMLP):
    pass


LINEARS: dict[type, type] = {
    nn.Linear: AdaptedLinear,
    nn.QuantizedLinear: AdaptedQuantizedLinear,
}
EMBEDDINGS: dict[type, type] = {
    nn.Embedding: AdaptedEmbedding,
    nn.QuantizedEmbedding: AdaptedQuantizedEmbedding,
}
EXPERTS: dict[type, type] = {
    SwitchLinear: AdaptedSwitchLinear,
    QuantizedSwitchLinear: AdaptedQuantizedSwitchLinear,
}
SORTING: dict[type, type] = {SwitchGLU: AdaptedSwitchGLU, SwitchMLP: AdaptedSwitchMLP}
LAYERS = {**LINEARS, **EMBEDDINGS, **EXPERTS}
"""The adapted class by exact type: a subclass may compute something else."""
_OWN = {adapted: own for own, adapted in {**LAYERS, **SORTING}.items()}


def own_type(layer: Any) -> type:
    """Returns the layer's class without adapters."""
    return _OWN.get(type(layer), type(layer))


def wrap(layer: Any) -> None:
    if type(layer) in _OWN:
        return
    if type(layer) in SORTING:
        layer.__class__ = SORTING[type(layer)]
        return
    layer.slots = AdapterSlots()
    if type(layer) in EMBEDDINGS:
        layer.head = AdapterSlots()
    layer.__class__ = LAYERS[type(layer)]


def unwrap(layer: Any) -> None:
    layer.__class__ = own_type(layer)
    for name in ("slots", "head"):
        layer.__dict__.pop(name, None)
