"""The adapters of one loaded model. Their folders, in mlx-lm's or PEFT's format, are read as arrays
by layer, and those are held against the model's layers before it is changed."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_server.errors import AdapterInvalid
from mlx_server.models.adapter_config import (
    CONFIG,
    MLX_WEIGHTS,
    PARTS,
    PEFT_WEIGHTS,
    TENSORS,
    AdapterConfig,
    plain_path,
    read_config,
)
from mlx_server.system.files import read_regular
from mlx_server.worker import lora_layers
from mlx_server.worker.forward_pass import forward_pass_of
from mlx_server.worker.lora_layers import (
    EMBEDDINGS,
    EXPERTS,
    LAYERS,
    LINEARS,
    SORTING,
    LoraDelta,
    own_type,
)
from mlx_server.worker.mlx_lm_internals import make_prompt_cache

Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class LoraTensors:
    """An adapter's tensors for one layer."""

    name: str
    """The common part of the tensors' names in the file."""
    a: mx.array
    """[in, rank], for experts [experts, in, rank]."""
    b: mx.array
    """[rank, out], for experts [experts, rank, out]."""
    scale: float
    magnitude: mx.array | None = None
    """[out]; only for DoRA."""
    head: bool = True
    """Whether an embedding's pair also applies where the embedding is the model's output head."""
    lookup: bool = True
    """Whether it applies to the embedding itself."""


def read_tensors(folder: Path) -> dict[str, LoraTensors]:
    """Returns the tensors by layer path: mlx-lm's own path, or Hugging Face's in PEFT's format.

    `models.adapter_reader` has checked the files in the server, which has the adapter unloaded if
    they have changed since.
    """
    config = read_config(folder, read_regular(folder / CONFIG))
    tensors = mx.load(str(folder / (PEFT_WEIGHTS if config.format == "peft" else MLX_WEIGHTS)))
    assert isinstance(tensors, dict)
    layers: dict[str, dict[str, mx.array]] = {}
    lookups = set[str]()
    for name, tensor in tensors.items():
        match = TENSORS[config.format].fullmatch(name)
        assert match
        layers.setdefault(match[1], {})[PARTS.get(match[2], match[2])] = tensor
        if ".lora_embedding_" in name:
            lookups.add(match[1])
    # PEFT does not adapt an output head that shares the embedding's weights.
    return {
        layer: _pair(config, layer, parts, head=layer not in lookups)
        for layer, parts in layers.items()
    }


def _pair(
    config: AdapterConfig, layer: str, parts: Mapping[str, mx.array], *, head: bool
) -> LoraTensors:
    a, b, magnitude = parts["lora_a"], parts["lora_b"], parts.get("m")
    if config.format == "peft" or a.ndim == 3:
        a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
    magnitude = None if magnitude is None else magnitude.flatten()
    return LoraTensors(layer, a, b, config.scale(layer, a.shape[-1]), magnitude, head)


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
    pairs: Mapping[str, LoraTensors], is_layer: Callable[[str], object]
) -> dict[str, LoraTensors]:
    """Returns the pairs, with one for all experts of a layer in place of one for each expert.

    is_layer: whether the model has a layer of this name.
    """
    pairs_by_layer: dict[str, LoraTensors] = {}
    experts: dict[str, dict[int, LoraTensors]] = {}
    for layer, pair in pairs.items():
        of_one = None if is_layer(layer) else ONE_EXPERT.fullmatch(layer)
        whole = next(filter(is_layer, _stacks(*of_one.group(1, 3))), None) if of_one else None
        if of_one is None or whole is None or whole in pairs:
            pairs_by_layer[layer] = pair
            continue
        others, number = experts.setdefault(whole, {}), int(of_one[2])
        if number in others:
            raise AdapterInvalid(f"{pair.name} and {others[number].name} are the same layer")
        others[number] = pair
    return pairs_by_layer | {layer: _stack(each) for layer, each in experts.items()}


def _stacks(block: str, linear: str) -> list[str]:
    names = STACKED_AS.get(linear, (linear,))
    return [f"{block}.{experts}.{name}" for experts in BLOCKS for name in names]


def _stack(experts: Mapping[int, LoraTensors]) -> LoraTensors:
    pairs = [experts[number] for number in sorted(experts)]
    first = pairs[0]
    if missing := set(range(max(experts))) - experts.keys():
        raise AdapterInvalid(f"{first.name}: the same layer of expert {min(missing)} is missing")
    for pair in pairs:
        if (len(pair.a), pair.b.shape[1]) != (len(first.a), first.b.shape[1]):
            raise AdapterInvalid(f"{pair.name}: its shape is not that of {first.name}")
    if any(pair.scale != first.scale for pair in pairs):
        pairs = [replace(pair, b=pair.b.astype(mx.float32) * pair.scale, scale=1) for pair in pairs]
    most = max(pair.a.shape[1] for pair in pairs)  # zeros add nothing
    a = [mx.pad(pair.a, [(0, 0), (0, most - pair.a.shape[1])]) for pair in pairs]
    b = [mx.pad(pair.b, [(0, most - len(pair.b)), (0, 0)]) for pair in pairs]
    return replace(first, a=mx.stack(a), b=mx.stack(b), scale=pairs[0].scale)


COMPANIONS = ("mlp.gate_and_up_proj", "shared_mlp.input_linear", "shared_mlp.output_linear")
"""Layers of checkpoints that some of mlx-lm's models split, all of which they want to see."""


def divided(
    pairs: Mapping[str, LoraTensors], model: nn.Module, is_known: Callable[[str], object]
) -> dict[str, LoraTensors]:
    """Returns the pairs, with the model's own layers in place of those that it has in parts or has
    joined. Its `sanitize` shows which: it is given the numbers of rows in place of weights."""
    modules = dict(model.named_modules())
    foreign = [layer for layer, pair in pairs.items() if pair.a.ndim == 2 and not is_known(layer)]
    begins, weights = [0], dict[str, mx.array]()
    for layer in foreign:
        width, height = pairs[layer].a.shape[0], pairs[layer].b.shape[1]
        rows = mx.arange(begins[-1], begins[-1] + height, dtype=mx.int32)[:, None]
        weights[f"{layer}.weight"] = mx.broadcast_to(rows, (height, width))
        begins.append(begins[-1] + height)
    for block in {layer.rpartition("layers.")[0] for layer in foreign if "layers." in layer}:
        for number, name in product(range(len(model.layers)), COMPANIONS):
            weights.setdefault(f"{block}layers.{number}.{name}.weight", mx.full((2, 1), -1))
    names = set(weights)
    try:
        sanitized: dict[str, mx.array] = model.sanitize(weights) if foreign else {}
    except Exception:  # it wants other weights too: these layers are then refused by name
        return dict(pairs)
    own = dict[str, LoraTensors]()
    for name in sanitized.keys() - names:
        path, part = name.removesuffix(".weight"), sanitized[name]
        if path in modules and part.ndim == 2 and (numbers := np.array(part[:, 0])).min() >= 0:
            own[path] = _of_rows([pairs[layer] for layer in foreign], begins, numbers)
    gone = {name.removesuffix(".weight") for name in names - sanitized.keys()} if own else set()
    return {layer: pair for layer, pair in pairs.items() if layer not in gone} | own


def _of_rows(pairs: Sequence[LoraTensors], begins: Sequence[int], rows: Ids) -> LoraTensors:
    """Returns the pair of a layer whose rows are these ones of the pairs' layers.

    begins: the number of each layer's first row.
    """
    owners = np.searchsorted(begins, rows, "right") - 1
    parts = list[LoraTensors]()
    magnitudes = mx.zeros(len(rows))
    for owner in np.unique(owners).tolist():
        places = mx.array(np.flatnonzero(owners == owner))
        owner_rows = mx.array(rows[owners == owner] - begins[owner])
        pair, b = pairs[owner], mx.zeros((pairs[owner].b.shape[0], len(rows)))
        b[:, places] = pair.b[:, owner_rows].astype(mx.float32) * pair.scale
        if pair.magnitude is not None:
            magnitudes[places] = pair.magnitude[owner_rows]
        parts.append(replace(pair, b=b.astype(pair.b.dtype), scale=1))
    return replace(
        parts[0],
        name=" and ".join(part.name for part in parts),
        a=mx.concatenate([part.a for part in parts], axis=1),
        b=mx.concatenate([part.b for part in parts], axis=0),
        magnitude=None if parts[0].magnitude is None else magnitudes,
    )


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
            for slots in [
                getattr(layer, name) for name in ("slots", "head") if hasattr(layer, name)
            ]:
                slots.remove(adapter)
                mx.eval(slots.arrays)
        self._nbytes.pop(adapter, None)
        used = {path for paths in self._layers.values() for path in paths}
        modules = dict(self._model.named_modules())
        for path in self._dtypes.keys() - used:
            lora_layers.unwrap(modules[path])
            del self._dtypes[path]
        for layer in modules.values():
            parts = layer.children().values()
            if own_type(layer) in SORTING and not any(hasattr(each, "slots") for each in parts):
                lora_layers.unwrap(layer)

    def _load(self, adapter: str, folder: Path) -> None:
        modules = dict(self._model.named_modules())
        pairs = _by_path(read_tensors(folder), modules, self._model)
        for problem, fix in ((_unsupported, TRAIN_OTHERS), (_misfit, TRAIN_AGAIN)):
            _refuse((problem(pair, path, modules) for path, pair in pairs.items()), fix)
        pairs, dtypes = self._called(pairs, modules)
        if not pairs:
            raise AdapterInvalid("it changes no layer that the model uses")
        deltas = {path: _delta(pair, modules[path], dtypes[path]) for path, pair in pairs.items()}
        _check_values(pairs, deltas)
        for path, delta in deltas.items():
            head = pairs[path].head
            layer = modules[path]
            lora_layers.wrap(layer, self._forward_pass)
            if pairs[path].lookup:
                layer.slots.put(adapter, delta)
            if own_type(layer) in EXPERTS:
                lora_layers.wrap(modules[_parent(path)], self._forward_pass)
            if own_type(layer) in EMBEDDINGS and head:
                layer.head.put(adapter, LoraDelta(delta.b.T, delta.a.T))
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


def _refuse(errors: Iterable[str | None], fix: str) -> None:
    """Raises AdapterInvalid if there is an error. errors: one per layer, None for a valid one."""
    reasons = sorted(error for error in errors if error)
    if not reasons:
        return
    named = "; ".join(reasons[:NAMED_LAYERS])
    if len(reasons) > NAMED_LAYERS:
        named += f"; and {len(reasons) - NAMED_LAYERS} more layers"
    raise AdapterInvalid(f"{named}. {fix}")


def _by_path(
    pairs: Mapping[str, LoraTensors], modules: Mapping[str, Any], model: nn.Module
) -> dict[str, LoraTensors]:
    # transformers' classes of one model name its layers in several ways, as mlx-lm's `sanitize`
    # of the checkpoint's tensors knows: they differ in the outer names only
    by_name: dict[str, list[str]] = {}
    for path in modules:
        by_name.setdefault(plain_path(path), []).append(path)

    def paths_of(layer: str) -> list[str]:
        return [layer] if layer in modules else by_name.get(plain_path(layer), [])

    by_path: dict[str, LoraTensors] = {}
    whole = stacked(pairs, paths_of)
    if len(whole) <= 4 * len(modules):  # else one that the model lacks is found below
        whole = divided(whole, model, paths_of)
    for layer, pair in whole.items():
        paths = paths_of(layer)
        if not paths and plain_path(layer) == "lm_head":  # as PEFT adapts a head alone
            paths = _heads(model, modules)
            pair = replace(pair, a=pair.b.T, b=pair.a.T, lookup=False)
        if len(paths) != 1:
            others = ", ".join(sorted(_next_to(layer, modules))[:NAMED_LAYERS])
            instead = f" next to {others}. {TRAIN_OTHERS}" if others else ""
            raise AdapterInvalid(f"{pair.name}: the model has no such layer{instead}")
        (path,) = paths
        if path in by_path:
            raise AdapterInvalid(f"{pair.name} and {by_path[path].name} are the same layer")
        by_path[path] = pair
    return by_path


def _heads(model: nn.Module, modules: Mapping[str, Any]) -> list[str]:
    """Returns the path of the embedding that is the model's output head, if one is."""
    embeddings = {
        path: module for path, module in modules.items() if own_type(module) in EMBEDDINGS
    }
    calls = _trace_layers(model, embeddings)
    return [path for path in embeddings if any(len(shape) == 3 for shape in calls[path].shapes)]


def _next_to(layer: str, modules: Mapping[str, Any]) -> set[str]:
    """The names of the layers that an adapter can change where this one would be."""
    parent = plain_path(_parent(layer))
    return {
        path.rpartition(".")[2]
        for path, module in modules.items()
        if plain_path(_parent(path)) == parent and own_type(module) in LAYERS
    }


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
    stored tensors; float16 has that of bfloat16."""
    a, b = pair.a.astype(_finer(pair.a.dtype, output)), pair.b.astype(_finer(pair.b.dtype, output))
    b = b if pair.scale == 1 else (b * pair.scale).astype(b.dtype)
    if pair.magnitude is None:
        return LoraDelta(mx.contiguous(a), mx.contiguous(b))
    adapted = _weight(layer).astype(mx.float32) + (a @ b).T
    ratio = pair.magnitude / mx.linalg.norm(adapted, axis=1)
    return LoraDelta(mx.contiguous(a), (b * ratio).astype(b.dtype), (ratio - 1).astype(mx.float32))


def _finer(stored: mx.Dtype, output: mx.Dtype) -> mx.Dtype:
    if (stored, output) == (mx.bfloat16, mx.float16):
        return output
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
