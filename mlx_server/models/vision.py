"""How models that see are shown pictures: in which sizes, and as which tokens of a prompt.

A model sees if its family is in the table here, its checkpoint has a vision tower, and the extra
`vision` is installed: mlx-vlm has the towers, and Pillow decodes pictures.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mlx_server import limits
from mlx_server.models.architectures import INSTALL, text_config_of, whole_package
from mlx_server.models.files import read_optional_json, stamp_of_model
from mlx_server.system.sandbox.files import FileRefused, processed
from mlx_server.system.sandbox.picture_recipes import (
    MOST_PATCHES,
    CutGrid,
    FilledGrid,
    FramesGrid,
    Layout,
    LinesGrid,
    LongestSide,
    NamedTiles,
    OneSquare,
    PatchGrid,
    PictureRecipe,
    Size,
    TileGrid,
    TileRows,
    TokenRows,
)

log = logging.getLogger("mlx_server.models")

KNOWN_VERSIONS = re.compile(r"0\.7\.[1-9]\d")

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3

Sections = Literal["interleaved", "consecutive"]
"""How the positions of a token (time, row and column; or place, column, row and picture) are spread
over a head's values."""


class VisionSettings(NamedTuple):
    """A checkpoint's files: what they say may be missing or wrong."""

    config: Mapping[str, Any]
    tower: Mapping[str, Any]
    processor: Mapping[str, Any]
    image: Mapping[str, Any]
    """The image processor's."""

    @property
    def size(self) -> Mapping[str, Any]:
        size = self.image.get("size")
        return size if isinstance(size, dict) else {}


@dataclass(frozen=True)
class Borrowed:
    """A processor of mlx-vlm's decides on a picture's tokens, in a process of its own."""

    folder: Path
    """The checkpoint's, from which it is made."""
    stamp: bytes
    """Of the checkpoint's files."""
    merge: int = 0
    """Of how many rows and columns of patches a token is, if it has three positions."""
    pixels: int = 0
    """The most that it has made of a picture; so are the following."""
    side: int = 0
    tokens: int = 0

    def within(self, tokens: int) -> LongestSide:
        is_low = tokens <= limits.LOW_DETAIL_TOKENS
        return LongestSide(1, LOW_SIDE if is_low else LONGEST_SIDE)

    def layout(self, sizes: Sequence[Size]) -> Layout:
        """The most tokens, as far as they are known."""
        return [self.tokens]


LONGEST_SIDE, LOW_SIDE = 3000, 512
"""The most pixels of a side for a borrowed processor: most of them make it smaller."""


@dataclass(frozen=True)
class VisionFamily:
    package: str
    """mlx-vlm's package of the family."""
    placeholder: str
    """What chat templates write for a picture."""
    recipe: Callable[[VisionSettings], PictureRecipe | Borrowed]
    sections: Sections | None = None
    """None: a token has one position."""
    token: str = ""
    """The image token, where a config has no id of it."""
    text: str = ""
    """What replaces the placeholder in the prompt's text, where that is not the same. It has one
    image token, which becomes as many as a picture has."""
    filter: int = BICUBIC
    pixel_bytes: int = 100
    """What is there at a time of a picture's pixels."""
    pads_heads: bool = False
    """Whether the tower's heads get a width for which attention keeps no scores."""
    is_normalized: bool = True
    """Whether a mean and a deviation apply to pixels, unless the files say it."""
    sees_whole: Literal["", "all", "sliding", "prompt"] = ""
    """In which layers the tokens of a picture see each other, also those after them; a piece of a
    prompt then has pictures as a whole. `prompt`: in all layers, all tokens of a prompt that begins
    with a picture see each other."""
    template: str = ""
    """The chat template of checkpoints, which have none."""


QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
GLM = "<|begin_of_image|><|image|><|end_of_image|>"
INTERN, INTERN_TEXT = "<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>\n"
HUNYUAN = "".join(f"<｜hy_place_holder▁no▁{number}｜>" for number in (100, 102, 101))
KIMI = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"


def _patch_grid(patch: int) -> Callable[[VisionSettings], PatchGrid]:
    """patch: the pixels of its side, unless the files say it."""

    def recipe(given: VisionSettings) -> PatchGrid:
        image, size = given.image, given.size
        return PatchGrid(
            _natural(image.get("patch_size"), given.tower.get("patch_size"), patch),
            _natural(image.get("merge_size"), given.tower.get("spatial_merge_size"), 2),
            _natural(size.get("shortest_edge"), image.get("min_pixels"), 56 * 56),
            _natural(size.get("longest_edge"), image.get("max_pixels"), 14 * 14 * 4 * 1280),
        )

    return recipe


def _glm(given: VisionSettings) -> FramesGrid:
    """The pixels of both frames of a picture count: it is a film of two."""
    grid = _patch_grid(14)(given)
    return FramesGrid(grid.patch, grid.merge, grid.least // 2, grid.most // 2)


def _hunyuan(given: VisionSettings) -> LinesGrid:
    grid = _patch_grid(16)(given)
    return LinesGrid(grid.patch, grid.merge, grid.least, grid.most)


def _gemma3(given: VisionSettings) -> OneSquare:
    side = _natural(given.size.get("height"), given.tower.get("image_size"), 896)
    return OneSquare(side, _natural(given.config.get("mm_tokens_per_image"), 256))


def _gemma3n(given: VisionSettings) -> OneSquare:
    tokens = _natural(given.config.get("vision_soft_tokens_per_image"), 256)
    return OneSquare(_natural(given.size.get("height"), 768), tokens, end="<end_of_image>")


def _pixtral(given: VisionSettings) -> TokenRows:
    patch = _natural(given.processor.get("patch_size"), given.tower.get("patch_size"), 16)
    cell = patch * _natural(
        given.processor.get("spatial_merge_size"), given.config.get("spatial_merge_size"), 1
    )
    longest = _natural(given.size.get("longest_edge"), given.tower.get("image_size"), 1024)
    return TokenRows(cell, longest, "[IMG_BREAK]", "[IMG_END]")


def _gemma4(given: VisionSettings) -> FilledGrid:
    patch = _natural(given.image.get("patch_size"), given.tower.get("patch_size"), 16)
    pool = given.image.get("pooling_kernel_size"), given.tower.get("pooling_kernel_size")
    return FilledGrid(
        patch * _natural(*pool, 3),
        _natural(given.image.get("max_soft_tokens"), given.image.get("num_soft_tokens"), 280),
    )


def _lfm2(given: VisionSettings) -> NamedTiles:
    image = given.image
    tolerance = image.get("max_pixels_tolerance")
    return NamedTiles(
        _natural(image.get("encoder_patch_size"), given.tower.get("patch_size"), 16),
        _natural(image.get("downsample_factor"), given.config.get("downsample_factor"), 2),
        _natural(image.get("tile_size"), 512),
        _natural(image.get("min_image_tokens"), 64),
        _natural(image.get("max_image_tokens"), 256),
        tolerance if type(tolerance) is float and 1 <= tolerance <= 100 else 2.0,
    )


def _idefics3(given: VisionSettings) -> TileRows:
    tiles = given.image.get("max_image_size")
    tile = tiles.get("longest_edge") if isinstance(tiles, dict) else None
    tile = _natural(tile, given.tower.get("image_size"), 364)
    patches = tile // _natural(given.tower.get("patch_size"), 14)
    tokens = (patches // _natural(given.config.get("scale_factor"), 2)) ** 2
    longest = _natural(given.size.get("longest_edge"), 4 * tile)
    return TileRows(tile, longest, max(1, tokens))


def _llava(given: VisionSettings) -> OneSquare:
    side = _natural(given.tower.get("image_size"), 336)
    tokens = (side // _natural(given.tower.get("patch_size"), 14)) ** 2
    is_clip = given.tower.get("model_type") == "clip_vision_model"
    if is_clip and given.config.get("vision_feature_select_strategy") == "full":
        tokens += 1
    mean = _three(given.image.get("image_mean"))
    red, green, blue = (int(255 * min(max(0.0, each), 1.0)) for each in mean)  # it may be NaN
    frame = (red, green, blue) if given.image.get("do_pad") is True else None
    shorter = _natural(given.size.get("shortest_edge"), side) * is_clip
    return OneSquare(side, tokens, shorter, frame=frame)


def _intern(given: VisionSettings) -> TileGrid:
    config, tower = given.config, given.tower
    side = _natural(config.get("force_image_size"), *_list(tower.get("image_size")), 448)
    patch, ratio = _natural(*_list(tower.get("patch_size")), 14), config.get("downsample_ratio")
    merge = round(1 / ratio) if type(ratio) is float and 0.1 < ratio <= 1 else 2
    return TileGrid(
        side,
        (side // patch // merge) ** 2,
        _natural(config.get("min_dynamic_patch"), given.image.get("min_patches"), 1),
        min(40, _natural(config.get("max_dynamic_patch"), given.image.get("max_patches"), 12)),
        config.get("use_thumbnail") is not False,
    )


def _kimi(given: VisionSettings) -> CutGrid:
    patch = _natural(given.image.get("patch_size"), given.tower.get("patch_size"), 14)
    merge = _natural(*_list(given.image.get("merge_kernel_size")), 2)
    most = _natural(given.image.get("in_token_limit"), 4096) * patch**2
    return CutGrid(patch, merge, 0, most, given.image.get("pad_input") is True)


PALIGEMMA = """\
{%- set all = namespace(texts=[], pictures=0) -%}
{%- for message in messages -%}
{%- set parts = message['content'].split('<image>') -%}
{%- set all.pictures = all.pictures + parts | length - 1 -%}
{%- set all.texts = all.texts + [parts | map('trim') | select | join('\n')] -%}
{%- endfor -%}
{{ '<image>' * all.pictures + bos_token + all.texts | join('\n') + '\n' }}"""
"""All pictures, and the text of all messages, as its authors describe."""

GEMMA3 = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"

FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": VisionFamily("qwen2_vl", QWEN, _patch_grid(14), "consecutive"),
    "qwen2_5_vl": VisionFamily("qwen2_5_vl", QWEN, _patch_grid(14), "consecutive"),
    **{
        package: VisionFamily(package, QWEN, _patch_grid(16), "interleaved", pads_heads=True)
        for package in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    },
    "glm4v": VisionFamily("glm4v", GLM, _glm, "consecutive"),
    "glm4v_moe": VisionFamily("glm4v_moe", GLM, _glm, "consecutive"),
    "hunyuan_vl": VisionFamily(
        "hunyuan_vl", HUNYUAN, _hunyuan, "consecutive", filter=BILINEAR, pads_heads=True
    ),
    "internvl": VisionFamily("internvl", INTERN, _intern, text=INTERN_TEXT),
    "internvl_chat": VisionFamily("internvl_chat", INTERN, _intern, token=INTERN, text=INTERN_TEXT),
    "kimi_vl": VisionFamily("kimi_vl", KIMI, _kimi),
    "llava": VisionFamily("llava", "<image>", _llava, text="<image>\n"),
    "paligemma": VisionFamily(
        "paligemma", "<image>", _llava, sees_whole="prompt", template=PALIGEMMA
    ),
    "gemma3": VisionFamily(
        "gemma3", "<start_of_image>", _gemma3, text=GEMMA3, filter=BILINEAR, sees_whole="all"
    ),
    "gemma3n": VisionFamily(
        "gemma3n",
        "<image_soft_token>",
        _gemma3n,
        text="\n\n<start_of_image><image_soft_token>\n\n",
        filter=BILINEAR,
        pixel_bytes=1200,
        is_normalized=False,
    ),
    **{
        package: VisionFamily(
            package,
            "<|image|>",
            _gemma4,
            text="<|image><|image|><image|>",
            is_normalized=False,
            pads_heads=True,
            sees_whole="sliding",
        )
        for package in ("gemma4", "gemma4_unified")
    },
    "lfm2_vl": VisionFamily(
        "lfm2_vl", "<image>", _lfm2, text="<|image_start|><image><|image_end|>"
    ),
    "smolvlm": VisionFamily("smolvlm", "<image>", _idefics3, filter=LANCZOS),
    "idefics3": VisionFamily("idefics3", "<image>", _idefics3, filter=LANCZOS),
    "pixtral": VisionFamily("pixtral", "[IMG]", _pixtral),
    "mistral3": VisionFamily("mistral3", "[IMG]", _pixtral),
}
"""By model type."""


IN_TOWER = re.compile(
    r"(?:model\.)?(?:language_model\.)?"
    r"(?P<part>visual|vision_tower|vision_encoder|multi_modal_projector|vision_projection|"
    r"embed_vision|vision_embedder|vision_model|connector|mlp1|mm_projector|vit)"
    r"\.(?P<name>.+)"
)
"""Matches the names of the tensors of a tower, and of what projects its output to the text model's
width."""


@dataclass(frozen=True)
class Vision:
    """How the pictures of one checkpoint become tokens."""

    family: VisionFamily
    token: int
    """The image token."""
    recipe: PictureRecipe | Borrowed
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """The mean and the deviation of the values of pixels, between 0 and 1, by colour."""
    filter: int
    sees_whole: Literal["", "all", "sliding", "prompt"]
    """As the family's, for this checkpoint."""
    tokens: int = limits.PICTURE_TOKENS
    """The most of a picture whose size decides on them."""

    @property
    def text(self) -> str:
        return self.family.text or self.family.placeholder

    def shown(self, detail: str | None = None) -> PictureRecipe:
        """The recipe of one picture."""
        low = min(limits.LOW_DETAIL_TOKENS, self.tokens)
        return self.recipe.within(low if detail == "low" else self.tokens)

    def layout(self, sizes: Sequence[Size]) -> Layout:
        return self.recipe.layout(sizes)

    @property
    def axes(self) -> int:
        """How many positions a token may have."""
        return 4 if isinstance(self.recipe, LinesGrid) else 3

    def grid(self, sizes: Sequence[Size]) -> tuple[int, int] | None:
        """The rows and columns of tokens that have positions of their own."""
        if self.family.sections and isinstance(self.recipe, PatchGrid):
            return self.recipe.grid(sizes[0])
        return None


IMAGE_TOKEN = (
    *("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id"),
)
NO_TOKEN = -1

MARKED = ("zaya1_vl",)
"""mlx-vlm's packages whose text model takes a mask of the tokens of pictures."""

THREE_POSITIONS = ("glm_ocr", "paddleocr_vl")
"""mlx-vlm's packages whose tokens have three positions, which each pass is told."""

BORROWING = ("kimi_k25",)
"""Types of models that mlx-lm has, for whose pictures there is no recipe. Llama 4 is none of them:
mlx-vlm's tower makes other features of the same picture each time, seen on a CPU."""

BORROWED_TOKENS = {"molmo": "<im_patch>"}
"""The image tokens of mlx-vlm's packages, where configs have no id of them."""

BORROWED_TEXTS = {
    "dots_ocr": "<|img|><|imgpad|><|endofimg|>",
    "glm_ocr": GLM,
    "kimi_k25": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
    "llava_onevision": "<image>\n",
    "paddleocr_vl": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
}
"""What is around the image token in prompts, if anything."""


def vision_of(folder: Path, config: Mapping[str, Any]) -> Vision | None:
    """None for a checkpoint without a tower, or of a family that is neither in the table nor one of
    mlx-vlm's that mlx-lm lacks."""
    kind, tower = str(config.get("model_type")), config.get("vision_config")
    family = FAMILIES.get(kind)
    package = None if family else kind if kind in BORROWING else whole_package(config)
    if package:
        tower = tower if isinstance(tower, dict) or kind in BORROWING else {}
        family = _borrowed_family(package, folder)
    if family is None or not isinstance(tower, dict):
        return None
    if family.package == "llava" and tower.get("model_type") == "pixtral":
        family = FAMILIES["pixtral"]
    ids = (config.get(name) for name in IMAGE_TOKEN)
    token = next((id for id in ids if type(id) is int), NO_TOKEN)
    if token == NO_TOKEN and not (family.token or package):
        return None
    processor = read_optional_json(folder / "processor_config.json")
    image = read_optional_json(folder / "preprocessor_config.json")
    if not image and isinstance(within := processor.get("image_processor"), dict):
        image = within
    sees_whole = family.sees_whole
    if sees_whole == "sliding":  # Gemma 4's small models see causally
        default = "vision" if family.package == "gemma4_unified" else None
        text = config.get("text_config")
        seen = text.get("use_bidirectional_attention", default) if isinstance(text, dict) else None
        sees_whole = "sliding" if seen == "vision" else ""
    is_normalized = image.get("do_normalize", family.is_normalized) is not False
    vision = Vision(
        family,
        token,
        family.recipe(VisionSettings(config, tower, processor, image)),
        _three(image.get("image_mean")) if is_normalized else (0.0,) * 3,
        _three(image.get("image_std")) if is_normalized else (1.0,) * 3,
        _natural(resample if (resample := image.get("resample")) in range(6) else 0, family.filter),
        sees_whole,
    )
    if not package and not _is_bounded(vision):
        log.warning("the model in %s is shown no pictures: their settings are damaged", folder.name)
        return None
    return vision


def _borrowed_family(package: str, folder: Path) -> VisionFamily:
    def recipe(given: VisionSettings) -> Borrowed:
        merge = _natural(given.tower.get("spatial_merge_size"), 2)
        return Borrowed(folder, packed_stamp(folder), merge * (package in THREE_POSITIONS))

    text, token = BORROWED_TEXTS.get(package, ""), BORROWED_TOKENS.get(package, "")
    return VisionFamily(package, "", recipe, text=text, token=token, pixel_bytes=50)


def packed_stamp(folder: Path) -> bytes:
    return repr(stamp_of_model(folder)).encode()


SHAPES = ((1, 1), (4000, 4000), (4000, 20), (20, 4000))
"""Sizes of pictures of which one has the most pixels and tokens for a model."""

ROWS_OF_WIDTH, ROWS_OF_INNER = 10, 3
"""What is there at a time of a tower's layer for each patch."""

FUSED_HEADS = (64, 80, 128)
"""The widths of heads for which MLX computes attention on a GPU without keeping its scores."""


def _is_bounded(vision: Vision) -> bool:
    """Whether pictures of all shapes stay within the limits on pixels and tokens: a number in a
    checkpoint's files may be any."""
    for size in SHAPES:
        try:
            resizes = vision.shown().resizes(*size)
            pixels = sum(width * height for chain in resizes for width, height in chain)
            if pixels > limits.PICTURE_PIXELS:
                return False
            layout = vision.layout([chain[-1] for chain in resizes])
        except ArithmeticError:
            return False
        tokens = sum(part for part in layout if isinstance(part, int))
        if not 0 < tokens <= limits.PICTURE_TOKENS:
            return False
    return True


def borrowing(vision: Vision, placeholder: str) -> Vision:
    """The vision with what its processor makes of pictures of all shapes. Raises FileRefused if
    it fails."""
    assert isinstance(vision.recipe, Borrowed)
    family = replace(vision.family, placeholder=placeholder)
    return replace(vision, recipe=_measured(vision.recipe, vision.token), family=family)


@lru_cache(16)
def _measured(recipe: Borrowed, token: int) -> Borrowed:
    pixels = side = tokens = 0
    for shape in ((640, 480), *SHAPES):
        ((size,),) = recipe.within(limits.PICTURE_TOKENS).resizes(*shape)
        try:
            made, _ = processed(recipe.folder, recipe.stamp, size, bytes(3 * size[0] * size[1]))
        except FileRefused:
            if not tokens:
                raise
            continue  # it has no tokens for such a shape
        if token not in made.ids:
            raise FileRefused("gets no image token from mlx-vlm's processor")
        areas = [width * height for width, height in made.sizes]
        pixels, tokens = max(pixels, sum(areas)), max(tokens, len(made.ids))
        side = max(side, math.isqrt(max(areas)) + 1)
    return replace(recipe, pixels=pixels, side=side, tokens=tokens)


def within_memory(
    vision: Vision, config: Mapping[str, Any], *, upcast: bool
) -> tuple[Vision | None, int]:
    """The vision with smaller pictures if the tower would take too much memory, and what it takes;
    None if the smallest ones do, as by damaged settings. upcast: see `tower_bytes`."""
    while (nbytes := tower_bytes(vision, config, upcast=upcast)) > limits.TOWER_BYTES:
        if vision.tokens <= limits.LOW_DETAIL_TOKENS:
            log.warning("a model is shown no pictures: its tower would take %d bytes", nbytes)
            return None, 0
        vision = replace(vision, tokens=vision.tokens // 2)
    return vision, nbytes


def tower_bytes(vision: Vision, config: Mapping[str, Any], *, upcast: bool) -> int:
    """The memory that a layer of the tower takes for the largest picture, beside its weights. It is
    measured in tests/worker/test_sight.py. upcast: whether it computes in float32, without a GPU.
    """
    tower: Mapping[str, Any] = config.get("vision_config") or config.get("vit_config") or {}
    recipe, nbytes = vision.recipe, 4 if upcast else 2
    width = _natural(tower.get("embed_dim"), tower.get("hidden_size"), 1024)
    heads = _natural(tower.get("num_heads"), tower.get("num_attention_heads"), 16)
    inner = _natural(tower.get("intermediate_size"), 4 * width)
    patch = _natural(getattr(recipe, "patch", None), *_list(tower.get("patch_size")), 14)
    head = width // heads
    if vision.family.pads_heads:
        head = next((fused for fused in FUSED_HEADS if head <= fused), head)
    scores = heads * 4 if upcast or head not in FUSED_HEADS else 0
    most = 0
    for shape in SHAPES:
        sizes = [chain[-1] for chain in vision.shown().resizes(*shape)]
        pixels = sum(wide * high for wide, high in sizes)
        if isinstance(recipe, Borrowed):
            pixels = recipe.pixels
        side = getattr(recipe, "tile", 0) or getattr(recipe, "side", 0)
        whole = side**2 if side > patch + 1 else pixels  # a view may be one of a picture's patches
        patches, seen = (area // patch**2 + 1 for area in (pixels, whole))
        values = (ROWS_OF_WIDTH * width + ROWS_OF_INNER * inner) * nbytes + scores * seen
        most = max(most, pixels * vision.family.pixel_bytes + patches * values)
    if vision.sees_whole == "prompt":  # a layer of the text model has the scores of a whole prompt
        tokens = sum(int(part) for part in vision.layout(sizes)) + limits.PREFIX_TOKENS
        heads = _natural(text_config_of(config).get("num_attention_heads"), 8)
        most = max(most, 2 * nbytes * heads * tokens**2)
    # MoonViT makes the positions of its largest picture for each
    is_moon = vision.family.package.startswith("kimi")
    return most + MOST_PATCHES**2 * head * 20 * is_moon


def _natural(*given: object) -> int:
    """The first positive number."""
    return next(each for each in given if type(each) is int and each > 0)


def _list(given: object) -> Sequence[object]:
    return given if isinstance(given, list) else [given]


def _three(given: object) -> tuple[float, float, float]:
    match given:
        case [float(red), float(green), float(blue)]:
            return red, green, blue
    return 0.5, 0.5, 0.5


USED_NAMES = {
    "*": "ModelConfig TextConfig VisionConfig Model",
    "qwen*vl": "patch_embed temporal_patch_size",
    "glm4v*": "patch_embed temporal_patch_size",
    "hunyuan_vl": "patch_embedding chunked_attention",
    "internvl*": "get_input_embeddings",
    "kimi_vl": "get_input_embeddings",
    "llava": "get_input_embeddings",
    "gemma3": "multi_modal_projector mm_input_projection_weight",
    "paligemma": "multi_modal_projector patch_embedding",
    "gemma3n": "get_image_features embed_vision conv_stem vocab_offset",
    "gemma4*": "encode_image",
    "lfm2_vl": "encode_images",
    "idefics3": "connector",
    "pixtral": "multi_modal_projector",
    "mistral3": "multi_modal_projector",
}
"""Names of mlx-vlm's that are used here, by its packages."""


def _lacking() -> str:
    """A used name that mlx-vlm's source does not have: only the engine process imports it."""
    spec = find_spec("mlx_vlm")
    folder = Path(((spec and spec.submodule_search_locations) or [""])[0], "models")
    for package in {family.package for family in FAMILIES.values()}:
        files = (folder / package).glob("*.py")
        words = {word for file in files for word in re.findall(r"\w+", file.read_text("utf-8"))}
        for pattern, names in USED_NAMES.items():
            for name in names.split() if fnmatch(package, pattern) else ():
                if name not in words:
                    return f"{name} in models.{package}"
    return ""


@cache
def can_see() -> bool:
    """Whether the extra `vision` is installed, in versions that are known. What is not is logged
    once."""
    why = ""
    if missing := [name for name in ("mlx_vlm", "PIL") if find_spec(name) is None]:
        why = f"{' and '.join(missing)} is not installed"
    elif not KNOWN_VERSIONS.match(found := version("mlx-vlm")):
        why = f"mlx-vlm {found} is not known here"
    elif lacking := _lacking():
        why = f"mlx-vlm {found} has no {lacking}"
    if why:
        log.warning("models are shown no pictures, since %s: %s", why, INSTALL)
    return not why
