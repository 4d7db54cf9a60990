"""Layers that apply LoRA to some rows of a forward pass and not to others.

A layer that an adapter changes gets another class, in place: its parameters, its path in the model
and all references to it stay the same, and restoring its class removes the change completely.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.worker.forward_pass import ForwardPass, RowAdapters, input_of
from mlx_server.worker.mlx_lm_internals import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)


@dataclass(frozen=True)
class LoraDelta:
    """The weights that an adapter adds to a layer."""

    a: mx.array
    """[in, rank], for experts [experts, in, rank]."""
    b: mx.array
    """[rank, out], for experts [experts, rank, out]; includes the adapter's own scale."""
    dora_ratio: mx.array | None = None
    """[out]; for DoRA, the relative change of the layer's own output."""

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.a, self.b, self.dora_ratio) if array is not None]


@dataclass(frozen=True)
class _Stack:
    """Several adapters in stacked arrays; position 0 is the base model, which adds nothing."""

    adapters: tuple[str, ...]
    a: mx.array
    b: mx.array
    dora_ratio: mx.array | None

    def delta(self, adapter: str) -> LoraDelta:
        """Returns an adapter's part of the stack, as views."""
        at = 1 + self.adapters.index(adapter)
        ratio = None if self.dora_ratio is None else _part(self.dora_ratio, at)
        return LoraDelta(_part(self.a, at), _part(self.b, at), ratio)


Found = list[tuple[_Stack, mx.array]]
"""Stacks, each with the rows' positions in it."""


class AdapterSlots:
    """What the loaded adapters add to one layer.

    Adapters that were mixed in a forward pass are kept in a stack, and their deltas become views of
    it, so that nothing is in memory twice. Only similar ranks share a stack, since it is padded to
    the largest one.
    """

    def __init__(self, forward_pass: ForwardPass) -> None:
        self._forward_pass = forward_pass
        self.deltas: dict[str, LoraDelta] = {}
        self._stacks: dict[tuple[mx.Dtype, int], _Stack] = {}
        self._last: tuple[RowAdapters, Found] | None = None

    def put(self, adapter: str, delta: LoraDelta) -> None:
        assert adapter not in self.deltas
        self.deltas[adapter] = delta

    def remove(self, adapter: str) -> None:
        """Removes an adapter; its memory is freed once `arrays` is evaluated."""
        if adapter not in self.deltas:
            return
        kind = _kind(self.deltas.pop(adapter))
        self._last = None
        stack = self._stacks.get(kind)
        if stack is None or adapter not in stack.adapters:
            return
        del self._stacks[kind]
        if others := set(stack.adapters) - {adapter}:
            self._restack(kind, others)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for delta in self.deltas.values() for array in delta.arrays]

    def rows(self) -> RowAdapters | None:
        """Returns the rows of the present forward pass if any of them uses an adapter here."""
        rows = self._forward_pass.rows
        return None if rows is None or rows.active.isdisjoint(self.deltas) else rows

    def linear(self, x: mx.array, rows: RowAdapters) -> mx.array:
        """x: [rows, ..., in], or [rows * tokens, in]."""
        by_row = x.reshape(len(rows), -1, x.shape[-1])
        if rows.only is not None:
            delta = self.deltas[rows.only]
            added = _scaled(by_row @ delta.a, rows) @ delta.b
        else:
            added = _sum(
                _outer(mx.gather_mm(by_row, stack.a, rhs_indices=at), stack, at, rows)
                for stack, at in self._found(rows)
            )
        return added.reshape(*x.shape[:-1], -1)

    def lookup(self, ids: mx.array, rows: RowAdapters) -> mx.array:
        by_row = ids.reshape(len(rows), -1)
        if rows.only is not None:
            delta = self.deltas[rows.only]
            added = _scaled(delta.a[by_row], rows) @ delta.b
        else:
            added = _sum(
                _outer(stack.a[at[:, None], by_row], stack, at, rows)
                for stack, at in self._found(rows)
            )
        return added.reshape(*ids.shape, -1)

    def scaled_by_dora(self, y: mx.array, rows: RowAdapters) -> mx.array | None:
        """y: [rows, ..., out], the layer's output without its bias. Returns None without DoRA."""
        if rows.only is not None:
            ratio = self.deltas[rows.only].dora_ratio
            ratios = [] if ratio is None else [ratio]
        else:
            stacks = self._found(rows)
            ratios = [s.dora_ratio[at][:, None] for s, at in stacks if s.dora_ratio is not None]
        if not ratios:
            return None
        by_row = y.reshape(len(rows), -1, y.shape[-1])
        return _scaled(by_row * _sum(ratios), rows).reshape(y.shape)

    def experts(
        self, x: mx.array, experts: mx.array, rows: RowAdapters, *, in_order: bool
    ) -> mx.array:
        """x: [..., 1, in]; in_order: whether tokens are sorted by expert."""
        scale: mx.array | float | None = rows.scale
        if scale is None:
            scale = rows.scales[rows.rows_of_choices(experts, in_order=in_order)][..., None, None]
        if rows.only is not None:
            delta = self.deltas[rows.only]
            return _chosen(x, delta.a, delta.b, experts, scale, in_order=in_order)
        row = rows.rows_of_choices(experts, in_order=in_order)
        return _sum(
            _chosen(
                x,
                stack.a.flatten(0, 1),
                stack.b.flatten(0, 1),
                experts + at[row].astype(experts.dtype) * stack.a.shape[1],
                scale,
                in_order=False,
            )
            for stack, at in self._found(rows)
        )

    def _found(self, rows: RowAdapters) -> Found:
        if self._last is None or self._last[0] is not rows:
            wanted: dict[tuple[mx.Dtype, int], set[str]] = {}
            for adapter in rows.active & self.deltas.keys():
                wanted.setdefault(_kind(self.deltas[adapter]), set()).add(adapter)
            stacks = [self._stack(kind, adapters) for kind, adapters in wanted.items()]
            self._last = rows, [(stack, rows.stack_positions(stack.adapters)) for stack in stacks]
        return self._last[1]

    def _stack(self, kind: tuple[mx.Dtype, int], adapters: set[str]) -> _Stack:
        known = self._stacks.get(kind)
        if known is None or not adapters.issubset(known.adapters):
            # Prefill and decoding alternate with different adapters: neither drops the other's.
            self._restack(kind, adapters.union(known.adapters if known else ()))
        return self._stacks[kind]

    def _restack(self, kind: tuple[mx.Dtype, int], adapters: set[str]) -> None:
        names = tuple(sorted(adapters))
        stack = self._stacks[kind] = _stacked(names, [self.deltas[name] for name in names])
        self.deltas |= {name: stack.delta(name) for name in names}


def _kind(delta: LoraDelta) -> tuple[mx.Dtype, int]:
    """Returns what deltas of one stack have in common: the type, and the rank rounded up to a power
    of two, so that padding at most doubles the memory."""
    return delta.a.dtype, (delta.a.shape[-1] - 1).bit_length()


def _stacked(adapters: tuple[str, ...], deltas: list[LoraDelta]) -> _Stack:
    rank = max(delta.a.shape[-1] for delta in deltas)
    ratios = [delta.dora_ratio for delta in deltas]
    some = next((ratio for ratio in ratios if ratio is not None), None)
    return _Stack(
        adapters,
        _after_zeros([_padded(delta.a, -1, rank) for delta in deltas]),
        _after_zeros([_padded(delta.b, -2, rank) for delta in deltas]),
        None
        if some is None
        else _after_zeros([mx.zeros_like(some) if r is None else r for r in ratios]),
    )


def _outer(inner: mx.array, stack: _Stack, at: mx.array, rows: RowAdapters) -> mx.array:
    return mx.gather_mm(_scaled(inner, rows), stack.b, rhs_indices=at)


def _chosen(
    x: mx.array,
    a: mx.array,
    b: mx.array,
    experts: mx.array,
    scale: mx.array | float,
    *,
    in_order: bool,
) -> mx.array:
    inner = mx.gather_mm(x, a, rhs_indices=experts, sorted_indices=in_order)
    if isinstance(scale, mx.array):
        inner = inner * scale.astype(inner.dtype)
    elif scale != 1:
        inner = inner * scale
    return mx.gather_mm(inner, b, rhs_indices=experts, sorted_indices=in_order)


def _sum(arrays: Iterable[mx.array]) -> mx.array:
    return reduce(mx.add, arrays)


def _scaled(inner: mx.array, rows: RowAdapters) -> mx.array:
    """inner: [rows, ..., ...]"""
    if rows.scale is None:
        return inner * rows.scales[:, None, None].astype(inner.dtype)
    return inner if rows.scale == 1 else inner * rows.scale


def _padded(array: mx.array, axis: int, size: int) -> mx.array:
    width = [(0, 0)] * array.ndim
    width[axis] = (0, size - array.shape[axis])
    return mx.pad(array, width) if width[axis][1] else array


def _part(stack: mx.array, at: int) -> mx.array:
    return stack[at : at + 1].squeeze(0)  # an index alone would copy


def _after_zeros(arrays: list[mx.array]) -> mx.array:
    return mx.stack([mx.zeros_like(arrays[0]), *arrays])


class _AdaptedLinear(nn.Module):
    slots: AdapterSlots

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(x)
        rows = self.slots.rows()
        if rows is None:
            return y
        added = self.slots.linear(input_of(self, x), rows)
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
        if rows is None:
            return y
        return y + self.head.linear(input_of(self, x), rows).astype(y.dtype)


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

    forward_pass: ForwardPass

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        rows = self.forward_pass.rows
        if rows is None or (rows.only is not None and rows.scale is not None):
            y: mx.array = super().__call__(x, indices)
            return y
        rows.sorted = mx.argsort(indices.flatten()) // (indices.size // len(rows))
        try:
            y = super().__call__(x, indices)
        finally:
            rows.sorted = None
        return y


def _adapted(by: type, *kinds: type) -> dict[type, type]:
    """Returns the adapted class of each class, by exact type: a subclass may compute something
    else."""
    return {kind: type(f"Adapted{kind.__name__}", (by, kind), {}) for kind in kinds}


LINEARS = _adapted(_AdaptedLinear, nn.Linear, nn.QuantizedLinear)
EMBEDDINGS = _adapted(_AdaptedEmbedding, nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = _adapted(_AdaptedExperts, SwitchLinear, QuantizedSwitchLinear)
SORTING = _adapted(_SortingExperts, SwitchGLU, SwitchMLP)
LAYERS = {**LINEARS, **EMBEDDINGS, **EXPERTS}
_OWN = {adapted: own for own, adapted in {**LAYERS, **SORTING}.items()}


def own_type(layer: Any) -> type:
    """Returns the layer's class without adapters."""
    return _OWN.get(type(layer), type(layer))


def wrap(layer: Any, forward_pass: ForwardPass) -> None:
    if type(layer) in _OWN:
        return
    if type(layer) in SORTING:
        layer.forward_pass = forward_pass
        layer.__class__ = SORTING[type(layer)]
        return
    layer.slots = AdapterSlots(forward_pass)
    if type(layer) in EMBEDDINGS:
        layer.head = AdapterSlots(forward_pass)
    layer.__class__ = LAYERS[type(layer)]


def unwrap(layer: Any) -> None:
    layer.__class__ = own_type(layer)
    for name in ("slots", "head", "forward_pass"):
        layer.__dict__.pop(name, None)
