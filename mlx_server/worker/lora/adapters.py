"""The adapters of one loaded model; a new one is checked fully before the model is changed."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_server import limits
from mlx_server.errors import AdapterInvalid
from mlx_server.lora.config import plain_path
from mlx_server.worker.lora import layers
from mlx_server.worker.lora.layers import (
    EMBEDDINGS,
    EXPERTS,
    LAYERS,
    LINEARS,
    SORTING,
    AdapterSlots,
    LoraDelta,
    forward_pass_of,
    own_type,
)
from mlx_server.worker.lora.tensors import LoraTensors, read, stacked
from mlx_server.worker.mlx_lm_internals import make_prompt_cache

ROWS, TOKENS = 2, 3
"""The shape of the traced forward pass; the product must differ from both numbers."""

NAMED_LAYERS = 8
"""The most layers that an error message names."""

TRAIN_AGAIN = "Choose an adapter that was trained for this model, with a supported rank"

TRAIN_OTHERS = (
    "Train the adapter for other layers: `keys` under `lora_parameters` of mlx-lm, or "
    "`target_modules` of PEFT, names them"
)

Shape = tuple[int, ...]


@dataclass
class LayerCalls:
    """The calls of one layer in the three traced forward passes."""

    shapes: list[Shape] = field(default_factory=list)
    """The shapes of the inputs."""
    dtype: mx.Dtype = mx.float32
    """The type of the latest output."""


class AdapterWeights:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forward_pass = forward_pass_of(model)
        self._layers: dict[str, dict[str, Any]] = {}
        """The layers that each adapter changes, by path."""
        self._nbytes: dict[str, int] = {}
        self._dtypes: dict[str, mx.Dtype] = {}
        """The output type of each wrapped layer, by path."""

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._layers

    def load(self, adapter: str, folder: Path) -> int:
        """Returns the adapter's size in bytes. Does nothing else if it is already loaded."""
        if adapter not in self:
            self._load(adapter, folder)
        return self._nbytes[adapter]

    def unload(self, adapter: str) -> None:
        for layer in self._layers.pop(adapter, {}).values():
            for slots in _slots(layer):
                slots.remove(adapter)
                mx.eval(slots.arrays)
        self._nbytes.pop(adapter, None)
        used = {path for paths in self._layers.values() for path in paths}
        modules = dict(self._model.named_modules())
        for path in self._dtypes.keys() - used:
            layers.unwrap(modules[path])
            del self._dtypes[path]
        for layer in modules.values():
            if own_type(layer) in SORTING and not any(map(_wrapped, layer.children().values())):
                layers.unwrap(layer)

    def _load(self, adapter: str, folder: Path) -> None:
        modules = dict(self._model.named_modules())
        pairs = _by_path(read(folder), modules)
        for problem, fix in ((_unsupported, TRAIN_OTHERS), (_misfit, TRAIN_AGAIN)):
            _refuse((problem(pair, path, modules) for path, pair in pairs.items()), fix)
        pairs, dtypes = self._called(pairs, modules)
        if not pairs:
            raise AdapterInvalid("it changes no layer that the model uses")
        deltas = {path: _delta(pair, modules[path], dtypes[path]) for path, pair in pairs.items()}
        _check_values(pairs, deltas)
        for path, delta in deltas.items():
            self._put(adapter, modules, path, delta, head=pairs[path].head)
        self._dtypes |= dtypes
        self._layers[adapter] = {path: modules[path] for path in deltas}
        self._nbytes[adapter] = _nbytes(deltas.values())

    def _called(
        self, pairs: dict[str, LoraTensors], modules: Mapping[str, Any]
    ) -> tuple[dict[str, LoraTensors], dict[str, mx.Dtype]]:
        """Returns the pairs of the layers that the model uses, and those layers' output types."""
        new = {path: modules[path] for path in pairs if path not in self._dtypes}
        calls = _trace_layers(self._model, new) if new else {}
        idle = {path for path in new if not calls[path].shapes and _adds_nothing(pairs[path])}
        used = [path for path in new if path not in idle]
        errors = (_error_of_calls(pairs[p].name, calls[p], own_type(new[p])) for p in used)
        _refuse(errors, TRAIN_OTHERS)
        taking_part = {path: pair for path, pair in pairs.items() if path not in idle}
        dtypes = {path: self._dtypes.get(path) or calls[path].dtype for path in taking_part}
        return taking_part, dtypes

    def _put(
        self, adapter: str, modules: Mapping[str, Any], path: str, delta: LoraDelta, *, head: bool
    ) -> None:
        layer = modules[path]
        layers.wrap(layer, self._forward_pass)
        layer.slots.put(adapter, delta)
        if own_type(layer) in EXPERTS:
            layers.wrap(modules[_parent(path)], self._forward_pass)
        if own_type(layer) in EMBEDDINGS and head:
            layer.head.put(adapter, LoraDelta(delta.b.T, delta.a.T))


def _refuse(errors: Iterable[str | None], fix: str) -> None:
    """Raises AdapterInvalid if there is an error. errors: one per layer, None for a valid one."""
    found = sorted(error for error in errors if error)
    if not found:
        return
    named = "; ".join(found[:NAMED_LAYERS])
    if len(found) > NAMED_LAYERS:
        named += f"; and {len(found) - NAMED_LAYERS} more layers"
    raise AdapterInvalid(f"{named}. {fix}")


def _by_path(
    pairs: Mapping[str, LoraTensors], modules: Mapping[str, Any]
) -> dict[str, LoraTensors]:
    # transformers' classes of one model name its layers in several ways, as mlx-lm's `sanitize`
    # of the checkpoint's tensors knows: they differ in the outer names only
    by_name: dict[str, list[str]] = {}
    for path in modules:
        by_name.setdefault(plain_path(path), []).append(path)

    def paths_of(layer: str) -> list[str]:
        return [layer] if layer in modules else by_name.get(plain_path(layer), [])

    found: dict[str, LoraTensors] = {}
    for layer, pair in stacked(pairs, lambda layer: bool(paths_of(layer))).items():
        paths = paths_of(layer)
        if len(paths) != 1:
            raise AdapterInvalid(f"{pair.name}: the model has no such layer")
        (path,) = paths
        if path in found:
            raise AdapterInvalid(f"{pair.name} and {found[path].name} are the same layer")
        found[path] = pair
    return found


def _unsupported(pair: LoraTensors, path: str, modules: Mapping[str, Any]) -> str | None:
    """Returns why no adapter can change the layer in this way, or None."""
    layer = modules[path]
    kind = own_type(layer)
    if kind not in LAYERS:
        return f"{pair.name}: a {kind.__name__} can't take LoRA here"
    if kind in EXPERTS and own_type(modules[_parent(path)]) not in SORTING:
        around = type(modules[_parent(path)]).__name__
        return f"{pair.name}: experts of a {around} can't take LoRA here"
    if pair.magnitude is not None and kind not in LINEARS:
        return f"{pair.name}: DoRA is supported for linear layers only"
    return None


def _misfit(pair: LoraTensors, path: str, modules: Mapping[str, Any]) -> str | None:
    """Returns why the adapter's matrices do not fit the layer, or None."""
    layer = modules[path]
    rank = pair.a.shape[-1]
    if not 1 <= rank <= limits.ADAPTER_RANK:
        return f"{pair.name}: the rank is {rank}; 1 to {limits.ADAPTER_RANK} is supported"
    *experts, width, height = _shape(layer)
    fits = pair.a.shape == (*experts, width, rank) and pair.b.shape == (*experts, rank, height)
    if not fits or (pair.magnitude is not None and pair.magnitude.shape != (height,)):
        return (
            f"{pair.name}: {pair.a.shape} and {pair.b.shape} do not fit the model's layer, "
            f"which is {(*experts, width, height)}"
        )
    return None


def _shape(layer: Any) -> Shape:
    """Returns the layer's (input, output) dimensions, for experts (experts, input, output)."""
    kind = own_type(layer)
    if kind in EXPERTS:
        return layer.num_experts, layer.input_dims, layer.output_dims
    height, width = layer.weight.shape
    if "scales" in layer:
        width = width * 32 // layer.bits
    return (height, width) if kind in EMBEDDINGS else (width, height)


def _trace_layers(model: nn.Module, traced: Mapping[str, Any]) -> dict[str, LayerCalls]:
    """Traces how layers are called for a prompt and then two tokens. Nothing is computed: only the
    graph is built."""
    calls = {path: LayerCalls() for path in traced}
    with _tracing(traced, calls):
        cache = make_prompt_cache(model)
        for tokens in (TOKENS, 1, 1):
            model(mx.zeros((ROWS, tokens), mx.int32), cache=cache)
    return calls


@contextmanager
def _tracing(traced: Mapping[str, Any], calls: Mapping[str, LayerCalls]) -> Iterator[None]:
    types = {path: type(layer) for path, layer in traced.items()}
    paths = {id(layer): path for path, layer in traced.items()}

    def record(layer: Any, x: mx.array, y: mx.array) -> mx.array:
        calls[paths[id(layer)]].shapes.append(x.shape)
        calls[paths[id(layer)]].dtype = y.dtype
        return y

    class Watched:
        def __call__(self, x: mx.array, *rest: Any, **named: Any) -> mx.array:
            return record(self, x, super().__call__(x, *rest, **named))  # type: ignore[misc]

        def as_linear(self, x: mx.array) -> mx.array:
            return record(self, x, super().as_linear(x))  # type: ignore[misc]

    try:
        for path, layer in traced.items():
            layer.__class__ = type("Watched", (Watched, types[path]), {})
        yield
    finally:
        for path, layer in traced.items():
            layer.__class__ = types[path]


def _error_of_calls(name: str, calls: LayerCalls, kind: type) -> str | None:
    """Returns why the layer's calls make LoRA impossible, or None. A layer that is not called in
    each step is used in some other way or was compiled, so that LoRA would have no effect, or the
    same one for every row."""
    sizes = [shape[0] if shape else 0 for shape in calls.shapes]
    prompt = [size for size in sizes if size != ROWS]
    if kind in EXPERTS:  # their inputs are ordered by token, and the rows are computed from that
        prompt = []
    if len(calls.shapes) < 3:
        return f"{name}: the model does not call this layer in each step"
    if any(size != ROWS * TOKENS for size in prompt):
        return f"{name}: the model does not call this layer row by row"
    return None


def _adds_nothing(pair: LoraTensors) -> bool:
    """Whether the pair was never trained, which is the case for a layer that the model skips."""
    return pair.magnitude is None and not mx.any(pair.b).item()


def _delta(pair: LoraTensors, layer: Any, output: mx.Dtype) -> LoraDelta:
    """Returns the pair as a delta, in at least the precision of the layer's output and of the
    stored tensors."""
    a, b = pair.a.astype(_finer(pair.a.dtype, output)), pair.b.astype(_finer(pair.b.dtype, output))
    b = b if pair.scale == 1 else (b * pair.scale).astype(b.dtype)
    if pair.magnitude is None:
        return LoraDelta(mx.contiguous(a), mx.contiguous(b))
    adapted = _weight(layer).astype(mx.float32) + (a @ b).T
    ratio = pair.magnitude / mx.linalg.norm(adapted, axis=1)
    return LoraDelta(mx.contiguous(a), (b * ratio).astype(b.dtype), (ratio - 1).astype(mx.float32))


def _finer(stored: mx.Dtype, output: mx.Dtype) -> mx.Dtype:
    return mx.result_type(mx.zeros((), stored), mx.zeros((), output))


def _weight(layer: Any) -> mx.array:
    if "scales" not in layer:
        weight: mx.array = layer.weight
        return weight
    return mx.dequantize(
        layer.weight,
        layer.scales,
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


def _check_values(pairs: Mapping[str, LoraTensors], deltas: Mapping[str, LoraDelta]) -> None:
    """Raises AdapterInvalid for NaN and infinities. Evaluates all deltas at once."""
    finite = mx.stack(
        [
            mx.all(mx.stack([mx.isfinite(array).all() for array in d.arrays]))
            for d in deltas.values()
        ]
    )
    mx.eval(finite, [delta.arrays for delta in deltas.values()])
    for path, good in zip(deltas, cast(list[bool], finite.tolist()), strict=True):
        if not good:
            raise AdapterInvalid(f"{pairs[path].name}: some values are not finite")


def _nbytes(deltas: Iterable[LoraDelta]) -> int:
    return sum(array.nbytes for delta in deltas for array in delta.arrays)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _slots(layer: Any) -> list[AdapterSlots]:
    return [getattr(layer, name) for name in ("slots", "head") if hasattr(layer, name)]


def _wrapped(layer: Any) -> bool:
    return hasattr(layer, "slots")
