"""What pictures add to one of mlx-lm's text models: a vision tower of mlx-vlm's, and hooks on the
model's modules.

A forward pass without pictures is the model's own: the hooks are there for those with pictures
alone. They find these in the model's `Sight`, as LoRA's layers find adapters in its `ForwardPass`:
no state of a row is left on the model.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_server import limits
from mlx_server.engine.messages import (
    FIRST_MEDIA_ID,
    Generate,
    Picture,
    media_ids,
)
from mlx_server.models.architectures import WRAPPING, text_config_of
from mlx_server.models.vision import Borrowed, Sections, Vision, vision_of
from mlx_server.worker.vision_towers import (
    Features,
    is_whole,
    load_tower,
    picture_inputs,
    tower_features,
)


class RowPictures:
    """The pictures of one row, and where its tokens are in time, rows and columns."""

    def __init__(self, request: Generate, vision: Vision) -> None:
        """Raises ValueError for pictures that are not in the prompt as they should be."""
        self.pictures = request.pictures
        self.scope = request.cache_scope
        self.ends: list[int] = []
        """The lengths of the prompt up to the end of each picture."""
        self.wholes: list[range] = []
        """The places of tokens that see each other, which one pass has to compute: those of a
        picture, or all of the prompt."""
        self.length = len(request.prompt)
        self.positions = np.zeros((vision.axes, self.length), np.int64)
        text = next_position = 0
        for number, each in enumerate(self.pictures):
            end = each.at + each.tokens
            self._check(request, each, vision)
            if each.at < text:
                raise ValueError("a picture begins within another one")
            begin = next_position + each.at - text
            self.positions[:, text : each.at] = np.arange(next_position, begin)
            positions, next_position = _positions(each, vision, begin, number)
            self.positions[:, each.at : end] = positions
            text = end
            self.ends.append(text)
            if vision.sees_whole:
                self.wholes.append(range(each.at, end))
        if self.wholes and text >= self.length:
            raise ValueError("a picture has to be followed by a token")
        if vision.sees_whole == "prompt":
            if self.pictures[0].at:
                raise ValueError("the prompt has to begin with a picture")
            self.wholes = [range(self.length)]
        self.positions[:, text:] = np.arange(next_position, next_position + self.length - text)
        self.offset = next_position - text
        """How far the positions of the tokens after the last picture are from their places."""

    def piece(self, known: int, size: int) -> int:
        """The size of the prompt's next piece where tokens see each other: it is the rest of a
        whole, or has none."""
        for whole in self.wholes:
            if whole.stop > known:
                return (
                    whole.stop - known if whole.start <= known else min(size, whole.start - known)
                )
        return size

    def is_within(self, length: int) -> bool:
        """Whether so many tokens end within a whole."""
        return any(whole.start < length < whole.stop for whole in self.wholes)

    def _check(self, request: Generate, picture: Picture, vision: Vision) -> None:
        tokens, end = picture.tokens, picture.at + picture.tokens
        if isinstance(vision.recipe, Borrowed):
            _, own = picture_inputs(picture.pixels)
            is_complete = 0 < tokens == own.stop - own.start
        else:
            pixels = sum(width * height for width, height in picture.sizes)
            images = sum(part for part in vision.layout(picture.sizes) if isinstance(part, int))
            is_complete = 0 < images == tokens - len(picture.texts)
            is_complete = is_complete and len(picture.pixels) == 3 * pixels
        if not is_complete:
            raise ValueError("a picture is not complete")
        if picture.at < 0 or request.prompt[picture.at : end] != media_ids(picture.digest, tokens):
            raise ValueError("a picture is not at its place in the prompt")


def _positions(picture: Picture, vision: Vision, begin: int, number: int) -> tuple[Any, int]:
    """The positions of a picture's tokens, and that of the token after it."""
    positions = np.tile(np.arange(begin, end := begin + picture.tokens), (vision.axes, 1))
    if not (grid := _grid(picture, vision)):
        return positions, end
    rows, columns = grid
    if vision.axes == 3:
        return begin + np.indices((1, rows, columns)).reshape(3, -1), begin + max(grid)
    row, column = np.indices((rows, columns + 1)).reshape(2, -1)
    positions[1:, 1:-1] = column, row, np.full_like(row, number)
    return positions, end


def _grid(picture: Picture, vision: Vision) -> tuple[int, int] | None:
    """The rows and columns of tokens that have positions of their own."""
    if not isinstance(vision.recipe, Borrowed):
        return vision.grid(picture.sizes)
    if not (merge := vision.recipe.merge):
        return None
    arrays, _ = picture_inputs(picture.pixels)
    rows, columns = cast(list[int], arrays["image_grid_thw"].flatten()[1:].tolist())
    return rows // merge, columns // merge


def row_pictures(model: nn.Module, request: Generate) -> RowPictures | None:
    """Raises ValueError for pictures that the model can't be shown."""
    if not request.pictures:
        return None
    if (sight := sight_of(model)) is None:
        raise ValueError("the model sees no pictures, as the log says of its load")
    return RowPictures(request, sight.vision)


Call = Callable[..., mx.array]

MOST_ENCODING = 8
"""Pictures of which a tower has computed a part; the oldest begins again."""


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
    def __init__(
        self, vision: Vision, tower: nn.Module, embed: Callable[..., mx.array], scale: float
    ) -> None:
        """embed: the text model's embedding of tokens. scale: what the text model multiplies all
        embeddings by, though not a picture's."""
        self.vision = vision
        self.tower = tower
        self.embed = embed
        self.scale = scale
        self.computed = 0
        """How many pictures the tower has computed."""
        self.rows: Sequence[RowPictures | None] = ()
        """Of the present forward pass; empty if no row has pictures."""
        self.hooks: list[tuple[nn.Module, Call]] = []
        """The modules that have another method while pictures are shown, and this one, which is
        given their own first."""
        self._classes: dict[tuple[int, type[nn.Module]], type[nn.Module]] = {}
        """Those of the hooked modules, by the hook's number and the module's own class."""
        self._starts: list[int] = []
        self._positions: mx.array | None = None
        self._masks: dict[int | None, tuple[Any, mx.array]] = {}
        """Of the present forward pass, by window: the model's mask, and that of pictures."""
        self._features: OrderedDict[tuple[str, bytes], Features] = OrderedDict()
        """By cache scope and digest, the most recently used last."""
        self._encoding: OrderedDict[tuple[str, bytes], Iterator[None]] = OrderedDict()
        """The pictures that the tower has begun to compute."""
        self._outputs: list[mx.array] | None = None
        """Those of the tower's layers, while it is called."""

    @contextmanager
    def showing(self, rows: Sequence[RowPictures | None], starts: list[int]) -> Iterator[None]:
        """starts: the tokens of each row that come before the pass."""
        self.rows, self._starts, self._positions = rows, starts, None
        classes = [(module, type(module)) for module, _ in self.hooks]
        try:
            for number, (module, hook) in enumerate(self.hooks):
                key = number, type(module)
                if key not in self._classes:
                    self._classes[key] = _with_hook(type(module), hook)
                module.__class__ = self._classes[key]
            yield
        finally:
            for module, kind in classes:
                module.__class__ = kind
            self.rows, self._positions = (), None
            self._masks.clear()

    def spans(self, width: int) -> Iterator[Span]:
        for number, (row, start) in enumerate(zip(self.rows, self._starts, strict=True)):
            for picture, end in zip(row.pictures, row.ends, strict=True) if row else ():
                begin, until = max(picture.at, start), min(end, start + width)
                if row and begin < until:
                    tokens = slice(begin - picture.at, until - picture.at)
                    yield Span(number, row, picture, slice(begin - start, until - start), tokens)

    def marks(self, width: int) -> mx.array:
        """[rows, width]: which tokens of the pass are a picture's."""
        marks = np.zeros((len(self.rows), width), bool)
        for span in self.spans(width):
            marks[span.row, span.columns] = True
        return mx.array(marks)

    def features(self, span: Span) -> Features:
        key = span.owner.scope, span.picture.own_digest
        if key not in self._features:
            for _ in self._encoded(key, span.picture):
                pass
        self._features.move_to_end(key)
        return self._features[key]

    def encode(self, owner: RowPictures, known: int, is_over: Callable[[], bool]) -> bool:
        """Computes some of the tower's layers for the next picture after so many tokens. False if
        its features are there already. is_over: whether other rows should get a token."""
        following = (p for p, end in zip(owner.pictures, owner.ends, strict=True) if end > known)
        picture = next(following, None)
        if picture is None or (key := (owner.scope, picture.own_digest)) in self._features:
            return False
        if key not in self._encoding:
            self._encoding[key] = self._encoded(key, picture)
            if len(self._encoding) > MOST_ENCODING:
                self._encoding.popitem(last=False)
        for _ in self._encoding[key]:
            if is_over():
                return True
        del self._encoding[key]
        return True

    def _encoded(self, key: tuple[str, bytes], picture: Picture) -> Iterator[None]:
        """Computes the tower for a picture, layer by layer. MLX computes nothing before it is asked
        for it: the outputs of layers are noted while the tower is called."""
        self.computed += 1
        self._outputs = []
        features = tower_features(self.tower, picture, self.vision)
        features[0] = features[0] / self.scale
        outputs, self._outputs = deque(self._outputs), None
        while outputs:
            mx.eval(outputs.popleft())
            yield
        features = self._with_texts(features, picture)
        mx.eval(features)
        self._features[key] = features
        self._drop()

    def note_layers(self) -> None:
        """Has the tower's layers note their outputs."""

        def noting(own: Call, *given: Any, **named: Any) -> mx.array:
            output = own(*given, **named)
            if self._outputs is not None:
                self._outputs.append(output)
            return output

        modules = self.tower.named_modules()
        towers = (each for name, each in modules if not name.startswith("language_model"))
        lists = (each for module in towers for each in module.values())
        layers = [_flat(each) for each in lists if isinstance(each, list) and each]
        for layer in max(layers, key=len, default=[]):
            layer.__class__ = _with_hook(type(layer), noting)

    def _with_texts(self, features: Features, picture: Picture) -> Features:
        """The features with the embeddings of the tokens of text between the picture's."""
        if not picture.texts or not picture.sizes:  # mlx-vlm has embedded them
            return features
        places = np.ones(picture.tokens, bool)
        ids = np.zeros(picture.tokens, np.int64)
        for place, id in picture.texts:
            places[place], ids[place] = False, id
        embeddings = self.embed(mx.array(ids))
        embeddings[mx.array(np.flatnonzero(places))] = features[0].astype(embeddings.dtype)
        return [embeddings, *features[1:]]

    def _drop(self) -> None:
        while len(self._features) > 1 and self._nbytes > limits.PICTURE_FEATURE_BYTES:
            self._features.popitem(last=False)

    @property
    def _nbytes(self) -> int:
        return sum(array.nbytes for features in self._features.values() for array in features)

    def mask(self, mask: Any, width: int, window: int | None) -> Any:
        """The mask of a layer, with which the tokens of a whole see each other. A piece of a prompt
        has a whole's last tokens if it has any of them."""
        if self._masks.get(window, (None, None))[0] is not mask:
            same = np.zeros((len(self.rows), 1, width, width), bool)
            for number, (row, start) in enumerate(zip(self.rows, self._starts, strict=True)):
                for whole in row.wholes if row else ():
                    columns = slice(max(0, whole.start - start), max(0, whole.stop - start))
                    same[number, 0, columns, columns] = True
            if not same.any():
                return mask
            if window is not None:
                back = np.subtract.outer(np.arange(width), np.arange(width))
                same &= back < window
            seen = mask
            if not isinstance(mask, mx.array):  # "causal": this row is alone
                length = width + self._starts[0]
                seen = mx.arange(length - width, length)[:, None] >= mx.arange(length)
            seen = mx.broadcast_to(seen, (len(self.rows), 1, width, seen.shape[-1]))
            seen = mx.concatenate([seen[..., :-width], seen[..., -width:] | mx.array(same)], -1)
            self._masks[window] = mask, seen
        return self._masks[window][1]

    def positions(self, width: int) -> mx.array:
        """[positions of a token, rows, width]"""
        if self._positions is None:
            positions = np.zeros((self.vision.axes, len(self.rows), width), np.int64)
            for number, (row, start) in enumerate(zip(self.rows, self._starts, strict=True)):
                positions[:, number] = np.arange(start, start + width) + (row.offset if row else 0)
                if row and start < row.length:
                    known = row.positions[:, start : start + width]
                    positions[:, number, : known.shape[1]] = known
            self._positions = mx.array(positions)
        return self._positions


def _flat(layers: list[Any]) -> list[nn.Module]:
    """The layers of a list, which may be in groups."""
    groups = (each if isinstance(each, list) else [each] for each in layers)
    return [layer for group in groups for layer in group]


def sight_of(model: nn.Module) -> Sight | None:
    return getattr(model, "sight", None)


def give_sight(model: nn.Module, folder: Path, config: Mapping[str, Any]) -> None:
    """Loads the checkpoint's tower, whose weights are not read yet, and hooks the model."""
    vision = vision_of(folder, config)
    if vision is None:
        raise ValueError("the checkpoint has no vision tower that is known here")
    if is_whole(model):
        whole: Any = model
        sight = Sight(vision, model, lambda ids: whole.get_input_embeddings(ids).inputs_embeds, 1.0)
        sight.note_layers()
        sight.hooks.append((model, partial(_passing_embeddings, sight)))
        model.sight = sight
        return
    inner = getattr(model, "language_model", model)
    inner = getattr(inner, "model", inner)
    inner = getattr(inner, "language_model", inner)
    tower = load_tower(folder, config, vision.family.package)
    scale = getattr(inner, "embed_scale", 1.0)
    if vision.family.package in ("gemma3", "paligemma"):
        scale = config["text_config"]["hidden_size"] ** 0.5
    if vision.family.package == "gemma3":  # as mlx-lm rounds it
        scale = float(mx.array(scale, mx.bfloat16))
    sight = Sight(vision, tower, _embedding(inner, tower), scale)
    sight.note_layers()
    hook_model(model, inner, sight, config)
    model.sight = sight


def _embedder(inner: nn.Module) -> nn.Module:
    return inner.tok_embeddings if "tok_embeddings" in inner else inner.embed_tokens


def _embedding(inner: Any, tower: Any) -> Callable[[mx.array], mx.array]:
    """The embedding of tokens that the text model takes; towers of Gemma 3n embed some of them."""
    own: Any = getattr(tower, "embed_vision", None)
    if not hasattr(own, "embedding"):
        return lambda ids: _embedder(inner)(ids)

    def embed(ids: mx.array) -> mx.array:
        hidden = inner.embed_tokens(ids) * inner.hidden_size**0.5
        first, last = own.vocab_offset, own.vocab_offset + own.vocab_size - 1
        within = mx.clip(ids, first, last)
        return mx.where((ids == within)[..., None], own(input_ids=within), hidden)

    return embed


# Hooks


def hook_model(model: nn.Module, inner: nn.Module, sight: Sight, config: Mapping[str, Any]) -> None:
    def hook(module: nn.Module, call: Callable[..., mx.array], *given: Any) -> None:
        sight.hooks.append((module, partial(call, sight, *given)))

    # their text models take no embeddings
    if config["model_type"] in WRAPPING or isinstance(sight.vision.recipe, Borrowed):
        hook(_embedder(inner), _embedding_pictures)
    else:
        hook(model, _passing_embeddings)
    family, text = sight.vision.family, text_config_of(config)
    deep = len(config["vision_config"].get("deepstack_visual_indexes") or ())
    axes: list[int] = []
    if family.sections:
        scaling = text.get("rope_scaling") or text["rope_parameters"]
        lengths = scaling.get("xdrope_section") or scaling["mrope_section"]
        axes = axes_of(lengths, family.sections)
    for number, layer in enumerate(inner.layers):
        if number < deep:
            hook(layer, _adding_features, number + 1)
        if axes and "self_attn" in layer:
            hook(layer.self_attn.rope, _turning(layer.self_attn.rope, axes))
        sees_whole = sight.vision.sees_whole
        is_sliding = bool(sees_whole and getattr(layer.self_attn, "is_sliding", False))
        if sees_whole in ("all", "prompt") or is_sliding:
            hook(layer, _seeing_whole, inner.window_size if is_sliding else None)


def _with_hook(base: type[nn.Module], hook: Call) -> type[nn.Module]:
    """The class of a module that calls `hook` with its own method; its weights keep their names."""

    def call(self: nn.Module, *given: Any, **named: Any) -> mx.array:
        return hook(partial(base.__call__, self), *given, **named)

    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def _passing_embeddings(
    sight: Sight, own: Call, ids: mx.array, *given: Any, **named: Any
) -> mx.array:
    spans = list(sight.spans(ids.shape[1]))
    if not spans:
        return own(ids, *given, **named)
    ids = mx.where(ids < FIRST_MEDIA_ID, ids, 0)
    hidden = _with_pictures(sight, sight.embed(ids), spans)
    return own(ids, *given, input_embeddings=hidden, **named)


def _embedding_pictures(sight: Sight, own: Call, ids: mx.array) -> mx.array:
    # the text within a picture is embedded alone, outside the rows of a pass
    spans = list(sight.spans(ids.shape[1])) if ids.ndim == 2 else []
    hidden = own(mx.where(ids < FIRST_MEDIA_ID, ids, 0) if spans else ids)
    return _with_pictures(sight, hidden, spans)


def _with_pictures(sight: Sight, hidden: mx.array, spans: Sequence[Span]) -> mx.array:
    for span in spans:
        features = sight.features(span)[0][span.tokens]
        hidden[span.row, span.columns] = features.astype(hidden.dtype)
    return hidden


def _adding_features(sight: Sight, number: int, own: Call, *given: Any, **named: Any) -> mx.array:
    hidden = own(*given, **named)
    for span in sight.spans(hidden.shape[1]):
        features = sight.features(span)[number][span.tokens]
        hidden[span.row, span.columns] += features.astype(hidden.dtype)
    return hidden


def _seeing_whole(
    sight: Sight,
    window: int | None,
    own: Call,
    hidden: mx.array,
    mask: Any = None,
    cache: Any = None,
    **named: Any,
) -> mx.array:
    """Has the tokens of a picture see those after them, too. window: how far back they see."""
    if hidden.shape[1] > 1:
        mask = sight.mask(mask, hidden.shape[1], window)
    return own(hidden, mask, cache, **named)


def axes_of(lengths: Sequence[int], sections: Sections) -> list[int]:
    """Which of a token's positions turns each pair of a head's values."""
    if sections == "consecutive":
        return [axis for axis, count in enumerate(lengths) for _ in range(count)]
    pairs = range(sum(lengths))  # time row column, again and again, and time at the end
    return [pair % 3 if pair < 3 * lengths[pair % 3] else 0 for pair in pairs]


def _turning(rope: nn.Module, axes: list[int]) -> Callable[..., mx.array]:
    is_scaled = type(rope).__name__ == "DynamicNTKAlphaRoPE"
    is_known = is_scaled or (type(rope) is nn.RoPE and rope.scale == 1)
    if not is_known or 2 * len(axes) != rope.dims:
        raise ValueError("the model has positions of a kind that pictures can't have here")
    chosen = mx.array(axes)
    periods = rope._freqs if is_scaled else rope.base ** (mx.arange(0, rope.dims, 2) / rope.dims)
    is_traditional = not is_scaled and rope.traditional

    def hooked(sight: Sight, own: Call, x: mx.array, offset: Any = 0) -> mx.array:
        positions = sight.positions(x.shape[2])
        if x.shape[2] == 1 and not any(True for _ in sight.spans(1)):
            return own(x, positions[0, :, 0])  # all are equal after a picture
        angles = positions[chosen].transpose(1, 2, 0)[:, None] / periods
        cos, sin = mx.cos(angles), mx.sin(angles)
        turned, rest = x[..., : rope.dims], x[..., rope.dims :]
        if is_traditional:
            a, b = turned[..., 0::2], turned[..., 1::2]
            pairs = mx.stack([a * cos - b * sin, b * cos + a * sin], -1)
            turned = pairs.reshape(turned.shape)
        else:
            a, b = mx.split(turned, 2, -1)
            turned = mx.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        return mx.concatenate([turned.astype(x.dtype), rest], -1)

    return hooked
