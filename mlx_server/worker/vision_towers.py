"""Vision towers: mlx-vlm's models without their text models, and what they make of a picture."""

import glob
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_server.engine.messages import Picture
from mlx_server.models.architectures import text_config_of
from mlx_server.models.files import MLX
from mlx_server.models.vision import IN_TOWER, MARKED, Borrowed, Vision
from mlx_server.system.sandbox.picture_recipes import (
    FilledGrid,
    NamedTiles,
    OneSquare,
    PatchGrid,
    TileGrid,
    TileRows,
)
from mlx_server.worker.unused_imports import placeholders, taken_modules

Features = list[mx.array]
"""What a tower makes of a picture, [image tokens, width] each: what stands for its tokens'
embeddings, followed by what is added after each of the first layers."""

PARTS = {
    "visual": "vision_tower",
    "vision_encoder": "vision_tower",
    "vision_projection": "multi_modal_projector",
    "vit": "vision_tower",
}
"""The names that mlx-vlm gives to parts of models, by those in other checkpoints."""


def load_tower(folder: Path, config: Mapping[str, Any], package: str) -> nn.Module:
    """The tower of a checkpoint, whose weights are not read yet."""
    tower = make_tower(config, package)
    tensors: dict[str, mx.array] = {}
    for file in glob.glob(f"{glob.escape(str(folder))}/*.safetensors"):
        loaded: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
        for name in loaded:
            if match := IN_TOWER.fullmatch(name):
                part = PARTS.get(match["part"], match["part"])
                tensors[f"{part}.{match['name']}"] = loaded[name]
    for module in (tower, tower.get("vision_tower"), tower.get("vision_model")):
        if sanitize := getattr(module, "sanitize", None):
            tensors = sanitize(tensors)
    if quantization := config.get(MLX):

        def quantized(path: str, layer: nn.Module) -> Any:
            settings = quantization.get(path)
            return settings if isinstance(settings, dict) else f"{path}.scales" in tensors

        whole = {name: quantization.get(name) for name in ("group_size", "bits")}
        mode = quantization.get("mode", "affine")
        nn.quantize(tower, **whole, mode=mode, class_predicate=quantized)
    tower.load_weights(list(tensors.items()), strict=True)
    tower.eval()
    return tower


class NoLanguageModel(nn.Module):
    """Embeds each token as zeros, for methods that put features in the place of tokens."""

    def __init__(self, settings: Any, *_: Any) -> None:
        super().__init__()
        self._width = getattr(settings, "text_config", settings).hidden_size

    def embed_tokens(self, ids: mx.array) -> mx.array:
        return mx.zeros((*ids.shape, self._width))

    @property
    def model(self) -> "NoLanguageModel":
        return self


def is_whole(model: Any) -> bool:
    """Whether it is mlx-vlm's with its text model."""
    is_theirs = hasattr(model, "get_input_embeddings")
    return is_theirs and not isinstance(model.language_model, NoLanguageModel)


def make_tower(config: Mapping[str, Any], name: str) -> nn.Module:
    """mlx-vlm's model of such a checkpoint, without its text model. Its weights are random."""
    package = package_of(name)
    text = text_config_of(config)
    settings = package.ModelConfig.from_dict({**config, "text_config": text, "audio_config": None})
    settings.text_config = package.TextConfig.from_dict(text)
    settings.vision_config = package.VisionConfig.from_dict(config["vision_config"])
    if name == "gemma3n":  # its model has none without sound
        settings.audio_config = package.AudioConfig()
    if name == "hunyuan_vl":
        settings.vision_config.model_type = name  # which newer checkpoints call hunyuan_vl_vision
        # its own attention keeps all scores
        fused = vars(OWN_MODULES["mlx_vlm.models.base"])["ensure_fused_sdpa"]
        vars(OWN_MODULES["mlx_vlm.models.hunyuan_vl.vision"])["chunked_attention"] = (
            lambda q, k, v, scale, chunk_size: fused(q, k, v, scale)
        )
    names = package.Model.__init__.__globals__
    own = {each: names[each] for each in ("LanguageModel", "AudioModel") if each in names}
    names.update(dict.fromkeys(own, NoLanguageModel))
    try:
        with own_modules():
            tower: nn.Module = package.Model(settings)
    finally:
        names.update(own)
    for part in ("audio_tower", "embed_audio"):
        tower.pop(part, None)
    return tower


# mlx-vlm's packages


UNUSED_NAMES = re.compile(r"mlx_vlm(\.speculative.*|\.models\..*\.process(ing|or)\w*)?")
"""What a tower does not need: mlx-vlm itself, its processors and its drafters import transformers
and what reads audio and video."""

PACKAGE = "mlx_vlm"
PATCH = "install_auto_processor_patch"
"""The function that makes transformers know mlx-vlm's processors."""


OWN_MODULES: dict[str, ModuleType] = {}
"""mlx-vlm's modules as towers have them, with placeholders: no other import gets them."""


@contextmanager
def own_modules() -> Iterator[None]:
    """Some of mlx-vlm's functions import others when they are called."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("mlx-vlm is not installed")
    others = taken_modules(PACKAGE)
    sys.modules.update(OWN_MODULES)
    try:
        with placeholders(UNUSED_NAMES, {PACKAGE: spec.submodule_search_locations}):
            yield
    finally:
        OWN_MODULES.update(taken_modules(PACKAGE))
        sys.modules.update(others)


def package_of(name: str) -> ModuleType:
    with own_modules():
        vars(import_module("mlx_vlm.models.base"))[PATCH] = lambda *_: None
        return import_module(f"mlx_vlm.models.{name}")


# Features


def tower_features(tower: nn.Module, picture: Picture, vision: Vision) -> Features:
    if isinstance(vision.recipe, Borrowed):
        return [whole_features(tower, picture_inputs(picture.pixels))]
    begin, views = 0, list[mx.array]()
    for width, height in picture.sizes:
        end = begin + 3 * width * height
        pixels = np.frombuffer(picture.pixels[begin:end], np.uint8).reshape(height, width, 3)
        values = mx.array(pixels).astype(mx.float32) / 255
        views.append((values - mx.array(vision.mean)) / mx.array(vision.std))
        begin = end
    with own_modules():
        return FEATURES[vision.family.package](tower, views, vision)


PictureInputs = tuple[dict[str, mx.array], slice]
"""What a processor of mlx-vlm's makes of a picture, and where its tokens are among the ids."""


def picture_inputs(packed: bytes) -> PictureInputs:
    loaded: Any = mx.load(BytesIO(packed), format="safetensors", return_metadata=True)
    arrays, places = loaded
    return arrays, slice(int(places["begin"]), int(places["end"]))


def whole_features(model: Any, inputs: PictureInputs) -> mx.array:
    """The embeddings of all tokens of a picture, by mlx-vlm's whole model."""
    (arrays, own), dtype = inputs, _dtype(model)
    for name in [name for name, array in arrays.items() if array.dtype == mx.float32]:
        arrays[name] = arrays[name].astype(dtype)
    ids, pixels = arrays.pop("input_ids"), arrays.pop("pixel_values")
    with own_modules():
        outputs = model.get_input_embeddings(ids, pixels, **arrays).to_dict()
    embeddings: mx.array = outputs.pop("inputs_embeds")
    if model.model_type in MARKED:
        del outputs["visual_pos_masks"]
    if further := [name for name, value in outputs.items() if value is not None]:
        raise ValueError(f"its text model also takes {further[0]}")
    if embeddings.shape[:2] != ids.shape:
        raise ValueError(f"it makes {embeddings.shape[1]} tokens of {ids.size}")
    return embeddings[0, own]


def _grid_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    recipe = vision.recipe
    assert isinstance(recipe, PatchGrid)
    patch, merge = recipe.patch, recipe.merge
    (values,) = views
    rows, columns = recipe.grid((values.shape[1], values.shape[0]))
    squares = values.reshape(rows, merge, patch, columns, merge, patch, 3)
    patches = squares.transpose(0, 3, 1, 4, 6, 2, 5)[..., None, :, :]
    embed = tower.vision_tower.patch_embed
    frames = embed.temporal_patch_size  # a picture is a film whose frames are the same
    patches = mx.repeat(patches, frames, axis=-3).reshape(rows * columns * merge**2, -1)
    grid = mx.array([[1, rows * merge, columns * merge]])
    outputs = tower.vision_tower(patches.astype(embed.proj.weight.dtype), grid)
    features, deep = outputs if isinstance(outputs, tuple) else (outputs, [])
    return [features, *deep]


def _gemma3_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    dtype = tower.multi_modal_projector.mm_input_projection_weight.dtype
    states, *_ = tower.vision_tower(views[0][None].astype(dtype))
    return list(tower.multi_modal_projector(states))


def _paligemma_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    dtype = tower.vision_tower.vision_model.embeddings.patch_embedding.weight.dtype
    states, *_ = tower.vision_tower(views[0][None].astype(dtype))
    return [tower.multi_modal_projector(states)]


def _gemma3n_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    dtype = tower.vision_tower.timm_model.conv_stem.conv.weight.dtype
    pixels = views[0].transpose(2, 0, 1)[None].astype(dtype)
    parts = tower.vision_tower, tower.config, tower.embed_vision
    return list(tower.get_image_features(pixels, *parts))


def _gemma4_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    return list(tower.encode_image(views[0].transpose(2, 0, 1)[None]))


def _unified_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    recipe = vision.recipe
    assert isinstance(recipe, FilledGrid)
    patches, (rows, columns) = _patches(views[0], recipe.cell)
    places = mx.stack([*mx.meshgrid(mx.arange(columns), mx.arange(rows))], -1).reshape(1, -1, 2)
    places = mx.minimum(places, len(tower.vision_embedder.pos_embedding) - 1)
    return [tower.encode_image(patches.transpose(0, 2, 3, 1).reshape(1, len(patches), -1), places)]


def _lfm2_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    recipe = vision.recipe
    assert isinstance(recipe, NamedTiles)
    whole = views[-1][None]
    parts = [whole] if len(views) == 1 else [_tiles(views[0], recipe.tile), whole]
    features: list[mx.array] = []
    for part in parts:
        count, height, width, _ = part.shape
        rows, columns, patch = height // recipe.patch, width // recipe.patch, recipe.patch
        patches = part.reshape(count, rows, patch, columns, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        features += tower.encode_images(
            patches.reshape(count, rows * columns, -1),
            spatial_shapes=mx.array([[rows, columns]] * count),
            pixel_attention_mask=mx.ones((count, rows * columns), mx.int32),
        )
    return [mx.concatenate(features)]


def _idefics3_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    recipe, whole = vision.recipe, views[-1][None]
    assert isinstance(recipe, TileRows)
    parts = [whole] if len(views) == 1 else [_tiles(views[0], recipe.tile), whole]
    features: list[mx.array] = []
    for part in parts:
        states, *_ = tower.vision_model(
            part.astype(tower.vision_model.embeddings.patch_embedding.weight.dtype)
        )
        features += list(tower.connector(states))
    return [mx.concatenate(features)]


def _tile_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    recipe = vision.recipe
    assert isinstance(recipe, OneSquare | TileGrid)
    tiles = mx.concatenate([_tiles(view, recipe.side) for view in views])
    return _embedded(tower, tiles.transpose(0, 3, 1, 2), recipe.tokens * len(tiles))


def _kimi_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    recipe, (view,) = vision.recipe, views
    assert isinstance(recipe, PatchGrid)
    pixels, *shapes = _patches(view, recipe.patch)
    count = len(pixels) // recipe.merge**2
    return _embedded(tower, pixels, count, image_grid_hws=mx.array(shapes), _grid_shapes=shapes)


def _patches(view: mx.array, patch: int) -> tuple[mx.array, tuple[int, int]]:
    """[patches, 3, patch, patch], row by row, and how many rows and columns they are."""
    rows, columns = view.shape[0] // patch, view.shape[1] // patch
    patches = view.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return patches.reshape(-1, 3, patch, patch), (rows, columns)


def _hunyuan_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    recipe, (view,) = vision.recipe, views
    assert isinstance(recipe, PatchGrid)
    pixels, shape = _patches(view, recipe.patch)
    dtype = tower.vision_tower.embeddings.patch_embedding.weight.dtype
    return list(tower.vision_tower(pixels.astype(dtype), mx.array([[1, *shape]])))


def _embedded(tower: Any, pixels: mx.array, count: int, **named: Any) -> Features:
    """What mlx-vlm's model puts in the place of so many image tokens."""
    settings = tower.config
    token = getattr(settings, "image_token_id", None) or settings.image_token_index
    ids = mx.full((1, count), token)
    outputs = tower.get_input_embeddings(ids, pixels.astype(_dtype(tower)), **named)
    return [outputs.inputs_embeds[0]]


def _dtype(model: nn.Module) -> mx.Dtype:
    dtypes: Iterable[mx.Dtype] = (array.dtype for _, array in tree_flatten(model.parameters()))
    return next(dtype for dtype in dtypes if dtype != mx.uint32)


def _tiles(view: mx.array, side: int) -> mx.array:
    """[tiles, side, side, 3], row by row."""
    rows, columns = view.shape[0] // side, view.shape[1] // side
    tiles = view.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(rows * columns, side, side, 3)


def _pixtral_features(tower: Any, views: Sequence[mx.array], vision: Vision) -> Features:
    sizes = [view.shape[:2] for view in views]
    *_, states = tower.vision_tower(views[0][None], output_hidden_states=True, image_sizes=sizes)
    chosen = states[tower.vision_feature_layer][0]
    if vision.family.package == "mistral3":
        return [tower.multi_modal_projector(chosen, sizes)]
    return [tower.multi_modal_projector(chosen)]


FEATURES: Mapping[str, Callable[[Any, Sequence[mx.array], Vision], Features]] = {
    "qwen2_vl": _grid_features,
    "qwen2_5_vl": _grid_features,
    "qwen3_vl": _grid_features,
    "qwen3_vl_moe": _grid_features,
    "qwen3_5": _grid_features,
    "qwen3_5_moe": _grid_features,
    "glm4v": _grid_features,
    "glm4v_moe": _grid_features,
    "hunyuan_vl": _hunyuan_features,
    "internvl": _tile_features,
    "internvl_chat": _tile_features,
    "kimi_vl": _kimi_features,
    "llava": _tile_features,
    "paligemma": _paligemma_features,
    "gemma3": _gemma3_features,
    "gemma3n": _gemma3n_features,
    "gemma4": _gemma4_features,
    "gemma4_unified": _unified_features,
    "lfm2_vl": _lfm2_features,
    "smolvlm": _idefics3_features,
    "idefics3": _idefics3_features,
    "pixtral": _pixtral_features,
    "mistral3": _pixtral_features,
}
"""By mlx-vlm's package."""
