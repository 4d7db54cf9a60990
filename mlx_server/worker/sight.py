"""What pictures add to one of mlx-lm's text models: a vision tower of mlx-vlm's, and hooks on the
model's modules.

A forward pass without pictures is the model's own: each hook then calls the module's own method.
The hooks find the pictures of a pass in the model's `Sight`, as LoRA's layers find adapters in its
`ForwardPass`: no state of a row is left on the model.
"""

import glob
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_server import limits
from mlx_server.engine.messages import FIRST_MEDIA_ID, Generate, Picture, media_ids
from mlx_server.models.files import MLX
from mlx_server.models.vision import IN_TOWER, Sections, Vision, vision_of

Features = list[mx.array]
"""What the tower makes of a picture, [tokens, width] each: what stands for its tokens' embeddings,
followed by what is added after each of the first layers."""


class RowPictures:
    """The pictures of one row, and where its tokens are in time, rows and columns."""

    def __init__(self, request: Generate, vision: Vision) -> None:
        """Raises ValueError for pictures that are not in the prompt as they should be."""
        self.pictures = request.pictures
        self.scope = request.cache_scope
        self.ends: list[int] = []
        """The lengths of the prompt up to the end of each picture."""
        self.length = len(request.prompt)
        self.positions = np.zeros((3, self.length), np.int64)
        text = next_position = 0
        for each in self.pictures:
            count = vision.count(each.width, each.height)
            if len(each.pixels) != 3 * each.width * each.height or not count or each.at < text:
                raise ValueError("a picture is not complete")
            if request.prompt[each.at : each.at + count] != media_ids(each.digest, count):
                raise ValueError("a picture is not at its place in the prompt")
            begin = next_position + each.at - text
            self.positions[:, text : each.at] = np.arange(next_position, begin)
            rows, columns = vision.grid(each.width, each.height)
            inside = np.indices((1, rows, columns)).reshape(3, -1)
            self.positions[:, each.at : each.at + count] = begin + inside
            text, next_position = each.at + count, begin + max(rows, columns)
            self.ends.append(text)
        self.positions[:, text:] = np.arange(next_position, next_position + self.length - text)
        self.offset = next_position - text
        """How far the positions of the tokens after the last picture are from their places."""


def row_pictures(model: nn.Module, request: Generate) -> RowPictures | None:
    """Raises ValueError for pictures that the model can't be shown."""
    if not request.pictures:
        return None
    if (sight := sight_of(model)) is None:
        raise ValueError("the model sees no pictures, as the log says of its load")
    return RowPictures(request, sight.vision)


class Span(NamedTuple):
    """Tokens of a picture that a forward pass computes."""

    row: int
    owner: RowPictures
    picture: Picture
    columns: slice
    """Of the pass's input."""
    tokens: slice
    """Of the picture's tokens."""


class Sight:
    def __init__(self, vision: Vision, tower: nn.Module) -> None:
        self.vision = vision
        self.tower = tower
        self.computed = 0
        """How many pictures the tower has computed."""
        self.rows: Sequence[RowPictures | None] = ()
        """Of the present forward pass; empty if no row has pictures."""
        self._starts: list[int] = []
        self._positions: mx.array | None = None
        self._features: OrderedDict[tuple[str, bytes], Features] = OrderedDict()
        """By cache scope and digest, the most recently used last."""

    @contextmanager
    def showing(self, rows: Sequence[RowPictures | None], starts: list[int]) -> Iterator[None]:
        """starts: the tokens of each row that come before the pass."""
        self.rows, self._starts, self._positions = rows, starts, None
        try:
            yield
        finally:
            self.rows, self._positions = (), None

    def spans(self, width: int) -> Iterator[Span]:
        for number, (row, start) in enumerate(zip(self.rows, self._starts, strict=True)):
            for picture, end in zip(row.pictures, row.ends, strict=True) if row else ():
                begin, until = max(picture.at, start), min(end, start + width)
                if row and begin < until:
                    tokens = slice(begin - picture.at, until - picture.at)
                    yield Span(number, row, picture, slice(begin - start, until - start), tokens)

    def features(self, span: Span) -> Features:
        key = span.owner.scope, span.picture.digest
        if key not in self._features:
            self.computed += 1
            self._features[key] = tower_features(self.tower, span.picture, self.vision)
            self._drop()
        self._features.move_to_end(key)
        return self._features[key]

    def _drop(self) -> None:
        while len(self._features) > 1 and self._nbytes > limits.PICTURE_FEATURE_BYTES:
            self._features.popitem(last=False)

    @property
    def _nbytes(self) -> int:
        return sum(array.nbytes for features in self._features.values() for array in features)

    def positions(self, width: int) -> mx.array:
        """[3, rows, width]"""
        if self._positions is None:
            positions = np.zeros((3, len(self.rows), width), np.int64)
            for number, (row, start) in enumerate(zip(self.rows, self._starts, strict=True)):
                positions[:, number] = np.arange(start, start + width) + (row.offset if row else 0)
                if row and start < row.length:
                    known = row.positions[:, start : start + width]
                    positions[:, number, : known.shape[1]] = known
            self._positions = mx.array(positions)
        return self._positions


def sight_of(model: nn.Module) -> Sight | None:
    return getattr(model, "sight", None)


@contextmanager
def seeing(
    model: nn.Module, rows: Sequence[RowPictures | None], tokens: Sequence[Sequence[int]]
) -> Iterator[None]:
    """Shows rows their pictures in the block's forward pass. tokens: those before it."""
    sight = sight_of(model)
    if sight is None or not any(rows):
        yield
        return
    with sight.showing(rows, list(map(len, tokens))):
        yield


def tower_features(tower: nn.Module, picture: Picture, vision: Vision) -> Features:
    patch, merge = vision.patch, vision.merge
    rows, columns = vision.grid(picture.width, picture.height)
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
    values = (mx.array(pixels).astype(mx.float32) / 255 - mx.array(vision.mean)) / mx.array(
        vision.std
    )
    squares = values.reshape(rows, merge, patch, columns, merge, patch, 3)
    patches = squares.transpose(0, 3, 1, 4, 6, 2, 5)[..., None, :, :]
    frames = tower.patch_embed.temporal_patch_size  # a picture is a film whose frames are the same
    patches = mx.repeat(patches, frames, axis=-3).reshape(rows * columns * merge**2, -1)
    grid = mx.array([[1, rows * merge, columns * merge]])
    made = tower(patches.astype(tower.patch_embed.proj.weight.dtype), grid)
    features, deep = made if isinstance(made, tuple) else (made, [])
    return [features, *deep]


# The tower


def give_sight(model: nn.Module, folder: Path, config: Mapping[str, Any]) -> None:
    """Loads the checkpoint's tower, whose weights are not read yet, and hooks the model."""
    vision = vision_of(folder, config)
    if vision is None:
        raise ValueError("the checkpoint has no vision tower that is known here")
    sight = Sight(vision, _tower(folder, config, vision.family.tower))
    hook_model(model, sight, config)
    model.sight = sight


def _tower(folder: Path, config: Mapping[str, Any], name: str) -> nn.Module:
    module = tower_module(name)
    settings = module.VisionConfig.from_dict(config["vision_config"])
    tower: nn.Module = module.VisionModel(settings)
    tensors: dict[str, mx.array] = {}
    for file in glob.glob(f"{glob.escape(str(folder))}/*.safetensors"):
        loaded: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
        tensors |= {found[1]: loaded[it] for it in loaded if (found := IN_TOWER.fullmatch(it))}
    tensors = tower.sanitize(tensors)
    if quantization := config.get(MLX):

        def quantized(path: str, layer: nn.Module) -> Any:
            own = quantization.get(f"vision_tower.{path}")
            return own if isinstance(own, dict) else f"{path}.scales" in tensors

        whole = {name: quantization.get(name) for name in ("group_size", "bits")}
        mode = quantization.get("mode", "affine")
        nn.quantize(tower, **whole, mode=mode, class_predicate=quantized)
    tower.load_weights(list(tensors.items()), strict=True)
    tower.eval()
    return tower


def tower_module(name: str) -> ModuleType:
    """mlx-vlm's module of a tower, without what its packages import: transformers and processors,
    of which a tower needs none."""
    spec = find_spec("mlx_vlm")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("mlx-vlm is not installed")
    before = {each: sys.modules.get(each) for each in ("mlx_vlm", f"mlx_vlm.models.{name}")}
    for each in before:
        empty = sys.modules[each] = ModuleType(each)
        inner = each.split(".")[1:]
        empty.__path__ = [str(Path(spec.submodule_search_locations[0], *inner))]
    try:
        return import_module(f"mlx_vlm.models.{name}.vision")
    finally:
        for each, package in before.items():
            del sys.modules[each]
            if package is not None:
                sys.modules[each] = package


# Hooks


def hook_model(model: nn.Module, sight: Sight, config: Mapping[str, Any]) -> None:
    inner = getattr(model, "language_model", model)
    inner = getattr(inner, "model", inner)
    _hook(model, _embedding_pictures(sight, inner))
    text = config["text_config"]
    scaling = text.get("rope_scaling") or text["rope_parameters"]
    axes = axes_of(scaling["mrope_section"], sight.vision.family.sections)
    deep = len(config["vision_config"].get("deepstack_visual_indexes") or ())
    for number, layer in enumerate(inner.layers):
        if number < deep:
            _hook(layer, _adding_features(sight, number + 1))
        if "self_attn" in layer:
            _hook(layer.self_attn.rope, _turning(sight, layer.self_attn.rope, axes))


Call = Callable[..., mx.array]


def _hook(module: nn.Module, hooked: Callable[[Call], Call]) -> None:
    """Has the module call `hooked` of its own method; its weights keep their names."""
    base = type(module)

    def call(self: nn.Module, *given: Any, **named: Any) -> mx.array:
        return hooked(lambda *given, **named: base.__call__(self, *given, **named))(*given, **named)

    module.__class__ = type(
        base.__name__, (base,), {"__call__": call, "__module__": base.__module__}
    )


def _embedding_pictures(sight: Sight, inner: nn.Module) -> Callable[[Call], Call]:
    def hooked(own: Call) -> Call:
        def call(ids: mx.array, *given: Any, **named: Any) -> mx.array:
            spans = list(sight.spans(ids.shape[1])) if sight.rows else []
            if not spans:
                return own(ids, *given, **named)
            ids = mx.where(ids < FIRST_MEDIA_ID, ids, 0)
            hidden = inner.embed_tokens(ids)
            for span in spans:
                features = sight.features(span)[0][span.tokens]
                hidden[span.row, span.columns] = features.astype(hidden.dtype)
            return own(ids, *given, input_embeddings=hidden, **named)

        return call

    return hooked


def _adding_features(sight: Sight, number: int) -> Callable[[Call], Call]:
    def hooked(own: Call) -> Call:
        def call(*given: Any, **named: Any) -> mx.array:
            hidden = own(*given, **named)
            for span in sight.spans(hidden.shape[1]) if sight.rows else ():
                features = sight.features(span)[number][span.tokens]
                hidden[span.row, span.columns] += features.astype(hidden.dtype)
            return hidden

        return call

    return hooked


def axes_of(lengths: Sequence[int], sections: Sections) -> list[int]:
    """Which of the three positions turns each pair of a head's values."""
    if sections == "consecutive":
        return [axis for axis, count in enumerate(lengths) for _ in range(count)]
    pairs = range(sum(lengths))  # time row column, again and again, and time at the end
    return [pair % 3 if pair < 3 * lengths[pair % 3] else 0 for pair in pairs]


def _turning(sight: Sight, rope: nn.Module, axes: list[int]) -> Callable[[Call], Call]:
    if type(rope) is not nn.RoPE or rope.scale != 1 or 2 * len(axes) != rope.dims:
        raise ValueError("the model has positions of a kind that pictures can't have here")
    chosen = mx.array(axes)
    frequencies = rope.base ** (-mx.arange(0, rope.dims, 2) / rope.dims)

    def hooked(own: Call) -> Call:
        def call(x: mx.array, offset: Any = 0) -> mx.array:
            if not sight.rows:
                return own(x, offset)
            positions = sight.positions(x.shape[2])
            if x.shape[2] == 1 and not any(True for _ in sight.spans(1)):
                return own(x, positions[0, :, 0])  # all three are equal after a picture
            angles = positions[chosen].transpose(1, 2, 0)[:, None] * frequencies
            cos, sin = mx.cos(angles), mx.sin(angles)
            turned, rest = x[..., : rope.dims], x[..., rope.dims :]
            if rope.traditional:
                a, b = turned[..., 0::2], turned[..., 1::2]
                pairs = mx.stack([a * cos - b * sin, b * cos + a * sin], -1)
                turned = pairs.reshape(turned.shape)
            else:
                a, b = mx.split(turned, 2, -1)
                turned = mx.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            return mx.concatenate([turned.astype(x.dtype), rest], -1)

        return call

    return hooked
