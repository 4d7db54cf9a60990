"""What the layers of a forward pass know besides their input: mlx-lm's models hand no further
argument down to them. These are the adapters and pictures of the rows, and the positions that
matrices and experts compute.

A pass is [rows, tokens], and rows with shorter drafts are padded at the right. Attention and
recurrent states need that shape; matrices get the real positions in one line, and the first one
several times where a kernel for more positions takes less time. So do experts, if they are then
read once for all.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.worker.kernels import SORTED, TILED
from mlx_server.worker.mlx_lm_internals import SHARDED, SwitchGLU
from mlx_server.worker.sight import RowPictures, sight_of

RowAdapter = tuple[str | None, float]
"""A row's adapter, None for the base model, and the scale of the adapter."""

NO_ADAPTER: RowAdapter = (None, 1.0)


class RowAdapters:
    """The adapters of the rows of a forward pass."""

    def __init__(self, row_adapters: Sequence[RowAdapter]) -> None:
        self.row_adapters = list(row_adapters)
        self.active = frozenset(adapter for adapter, _ in row_adapters if adapter is not None)
        first = row_adapters[0][0] if row_adapters else None
        self.only = first if all(adapter == first for adapter, _ in row_adapters) else None
        """The adapter that all rows use; None if they differ or use none."""
        self.sorted: mx.array | None = None
        """The row of each token while experts compute tokens sorted by expert."""
        self._stack_positions: dict[tuple[str, ...], mx.array] = {}

    def __len__(self) -> int:
        return len(self.row_adapters)

    @cached_property
    def scale(self) -> float | None:
        """The scale that all rows with an adapter share; None if they differ."""
        scales = {scale for adapter, scale in self.row_adapters if adapter is not None}
        return scales.pop() if len(scales) == 1 else None

    @cached_property
    def scales(self) -> mx.array:
        return mx.array([scale for _, scale in self.row_adapters], mx.float32)

    def stack_positions(self, adapters: tuple[str, ...]) -> mx.array:
        """Returns each row's position in a stack of these adapters; 0 is the base model."""
        if adapters not in self._stack_positions:
            positions = {adapter: number for number, adapter in enumerate(adapters, 1)}
            rows = [positions.get(a, 0) if a else 0 for a, _ in self.row_adapters]
            self._stack_positions[adapters] = mx.array(rows, mx.uint32)
        return self._stack_positions[adapters]

    def rows_of_choices(self, experts: mx.array, *, in_order: bool) -> mx.array:
        """Returns the row of each choice of an expert. experts: the chosen ones, [..., choices];
        in_order: they are sorted by expert."""
        if in_order:
            assert self.sorted is not None, "the order of the sorted tokens is unknown"
            return self.sorted
        return (mx.arange(experts.size) // (experts.size // len(self))).reshape(experts.shape)


class ForwardPass:
    """The rows of a model's present forward pass. The model has it as an attribute, and each layer
    that an adapter changes is given it when it is wrapped."""

    rows: RowAdapters | None = None
    """None if no row uses an adapter."""


def forward_pass_of(model: Any) -> ForwardPass:
    if not hasattr(model, "forward_pass"):
        model.forward_pass = ForwardPass()
    forward_pass: ForwardPass = model.forward_pass
    return forward_pass


@contextmanager
def using(rows: RowAdapters, model: Any) -> Iterator[None]:
    """Sets the rows around a model's call, which builds the graph; evaluate it at any time."""
    forward_pass = forward_pass_of(model)
    before, forward_pass.rows = forward_pass.rows, rows if rows.active else None
    try:
        yield
    finally:
        forward_pass.rows = before


@contextmanager
def seeing(
    model: nn.Module, pictures: Sequence[RowPictures | None], tokens: Sequence[Sequence[int]]
) -> Iterator[None]:
    """Shows rows their pictures in the block's forward pass. tokens: those before it."""
    sight = sight_of(model) if any(pictures) else None
    if sight is None:
        yield
        return
    with sight.showing(pictures, list(map(len, tokens))):
        yield


class Packing:
    """Which positions of the present forward pass are real, and which are padding."""

    shape: tuple[int, int] | None = None
    padding = 0
    """The positions that matrices compute twice."""
    real: mx.array
    """The flat places of the real positions."""
    places: mx.array
    """The flat places of the padding."""
    back: mx.array
    """For each position of the pass, padding included, its place among the real ones."""


class Ends:
    """What the output heads compute in the present pass: a prompt needs logits of its last token
    only, and those of a long piece would take gigabytes."""

    heads: Collection[int] = ()
    """Their ids; none if they compute all positions."""
    shape = (0, 0)
    places: mx.array | None = None
    """The place of each row's last token, [rows, 1, 1]; None if that is the last one of the
    pass."""


def heads_of(model: nn.Module) -> Collection[int]:
    """Returns the ids of what may be the model's output heads: an embedding is one only where its
    `as_linear` is called."""
    named = model.named_modules()
    return {
        id(module)
        for name, module in named
        if name.endswith("lm_head") or isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    }


@contextmanager
def at_ends(heads: Collection[int], lengths: Sequence[int]) -> Iterator[None]:
    """lengths: of each row's input, which is padded at the right."""
    Ends.heads, Ends.shape = heads, (len(lengths), max(lengths))
    is_padded = min(lengths) < max(lengths)
    Ends.places = mx.array(list(lengths))[:, None, None] - 1 if is_padded else None
    try:
        yield
    finally:
        Ends.heads = ()


def input_of(layer: Any, x: mx.array) -> mx.array:
    """Returns the part of a layer's input, [rows, tokens, in], that it computes in this pass."""
    if not Ends.heads or id(layer) not in Ends.heads or x.shape[:2] != Ends.shape:
        return x
    return x[:, -1:] if Ends.places is None else mx.take_along_axis(x, Ends.places, axis=1)


@contextmanager
def packed(lengths: Sequence[int], padding: int) -> Iterator[None]:
    """lengths: of each row's input. padding: how many positions to add."""
    longest = max(lengths)
    if padding or min(lengths) < longest:
        real = [row * longest + at for row, length in enumerate(lengths) for at in range(length)]
        ends = [sum(lengths[: row + 1]) for row in range(len(lengths))]
        back = [
            end - length + min(at, length - 1)
            for end, length in zip(ends, lengths, strict=True)
            for at in range(longest)
        ]
        Packing.shape, Packing.padding = (len(lengths), longest), padding
        Packing.real, Packing.back = mx.array(real), mx.array(back)
        Packing.places = mx.array(real + real[:1] * padding)
    try:
        yield
    finally:
        Packing.shape, Packing.padding = None, 0


def _is_pass(x: mx.array) -> bool:
    return x.ndim == 3 and x.shape[:2] == Packing.shape


def _of_positions(
    product: Callable[[Any, mx.array], mx.array],
) -> Callable[[Any, mx.array], mx.array]:
    def call(layer: Any, x: mx.array) -> mx.array:
        if Packing.shape is None or not _is_pass(x):  # most steps pay no second call
            return product(layer, input_of(layer, x) if Ends.heads else x)
        y = product(layer, x.reshape(-1, x.shape[-1])[Packing.places])
        return mx.unflatten(y[Packing.back], 0, x.shape[:2])

    return call


_experts: Callable[[Any, mx.array, mx.array], mx.array] = SwitchGLU.__call__


def _of_experts(layer: Any, x: mx.array, indices: mx.array) -> mx.array:
    is_packed = Packing.shape is not None and _is_pass(x)
    if type(layer) is not SwitchGLU or not is_packed:  # adapters count the pass's rows
        return _experts(layer, x, indices)
    padded = len(Packing.places) * indices.shape[-1]
    is_tiled = padded >= max(SORTED, TILED * layer.up_proj.num_experts)
    taken = Packing.places if is_tiled else Packing.real
    flat, chosen = (each.reshape(-1, each.shape[-1])[taken] for each in (x, indices))
    return mx.unflatten(_experts(layer, flat, chosen)[Packing.back], 0, x.shape[:2])


for kind in (nn.Linear, nn.QuantizedLinear, *SHARDED):
    kind.__call__ = _of_positions(kind.__call__)  # type: ignore[method-assign, unused-ignore]
for kind in (nn.Embedding, nn.QuantizedEmbedding):
    kind.as_linear = _of_positions(kind.as_linear)  # type: ignore[method-assign, unused-ignore]
SwitchGLU.__call__ = _of_experts  # type: ignore[method-assign, unused-ignore]
