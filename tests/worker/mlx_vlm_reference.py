"""mlx-vlm's models and image processors, with which those here are compared."""

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_server.models.architectures import text_config_of
from mlx_server.models.vision import Vision
from mlx_server.system.sandbox.picture_recipes import PatchGrid, TileGrid
from tests.tiny_vision import BORROWING, WHOLE_FAMILIES, shrink

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")


def whole_model(folder: Path) -> Any:
    """mlx-vlm's own."""
    if folder.name in (*WHOLE_FAMILIES, *BORROWING):
        return import_module("mlx_vlm.utils").load_model(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    package = import_module(f"mlx_vlm.models.{config['model_type']}")
    shrink(package)
    made = package.ModelConfig.from_dict(config)
    if sound := config.pop("audio_config", None):
        made.audio_config = package.AudioConfig.from_dict(sound)
    made.text_config = package.TextConfig.from_dict(text_config_of(config))
    made.vision_config = package.VisionConfig.from_dict(config["vision_config"])
    model = package.Model(made)
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    if config["model_type"] in ("smolvlm", "idefics3"):
        inner = "language_model.model."
        weights = {name.replace(inner, "language_model."): it for name, it in weights.items()}
    if config["model_type"] == "gemma3n":
        inner = "language_model.model."
        weights = {name.replace("model.language_model.", inner): it for name, it in weights.items()}
    model.load_weights(list(weights.items()), strict=not sound)
    model.eval()
    adapted = {"paligemma": PrefixModel, "gemma3n": corrected, "hunyuan_vl": HunyuanModel}
    return adapted.get(config["model_type"], lambda model: model)(model)


def corrected(model: Any) -> Any:
    """mlx-vlm's Gemma 3n leaves out what transformers' multiplies embeddings by. Its tower takes
    long, and is called once."""
    embed, tower, made = model.language_model.model.embed_tokens, model.vision_tower, list[Any]()
    scaled = {"__call__": lambda self, ids: self.weight[ids] * 8.0}
    embed.__class__ = type("Scaled", (nn.Embedding,), scaled)

    def once(pixels: mx.array, **_: Any) -> Any:
        made[:] = made or [tower(pixels)]
        return made[0]

    model.vision_tower = once
    return model


def settings_of(folder: Path) -> dict[str, Any]:
    """What an image processor is made with."""
    files = [folder / f"{name}.json" for name in ("processor_config", "preprocessor_config")]
    return {k: v for f in files if f.is_file() for k, v in json.loads(f.read_text()).items()}


def qwen_processor(folder: Path, vision: Vision) -> Any:
    module = import_module("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    recipe = vision.recipe
    assert isinstance(recipe, PatchGrid)
    return module.Qwen3VLImageProcessor(
        recipe.patch, merge_size=recipe.merge, min_pixels=recipe.least, max_pixels=recipe.most
    )


def glm_processor(folder: Path, vision: Vision) -> Any:
    module = import_module("transformers.models.glm4v.image_processing_pil_glm4v")
    return module.Glm4vImageProcessorPil(**settings_of(folder))


def kimi_processor(folder: Path, vision: Vision) -> Any:
    module = import_module("mlx_vlm.models.kimi_vl.processing_kimi_vl")
    return module.KimiVLImageProcessor(**settings_of(folder))


class StackedPixels:
    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, images: Sequence[Any]) -> dict[str, Any]:
        return {"pixel_values": np.stack(self.own(images)["pixel_values"])}


def hunyuan_processor(folder: Path, vision: Vision) -> Any:
    module = import_module("mlx_vlm.models.hunyuan_vl.processing_hunyuan_vl")
    return module.HunYuanVLImageProcessor(**settings_of(folder))


def llava_processor(folder: Path, vision: Vision) -> Any:
    """transformers', since mlx-vlm's fails."""
    module = import_module("transformers.models.llava.image_processing_pil_llava")
    return StackedPixels(module.LlavaImageProcessorPil(**settings_of(folder)))


def intern_processor(folder: Path, vision: Vision) -> Any:
    """transformers', since mlx-vlm's makes other tiles of squares than InternVL's authors do."""
    module = import_module("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    recipe = vision.recipe
    assert isinstance(recipe, TileGrid)
    size = {"height": recipe.side, "width": recipe.side}
    settings = {**settings_of(folder), "size": size, "max_patches": recipe.most}
    return StackedPixels(module.GotOcr2ImageProcessorPil(**settings, crop_to_patches=True))


def smolvlm_processor(folder: Path, vision: Vision) -> Any:
    module = import_module("transformers.models.smolvlm.image_processing_pil_smolvlm")
    return module.SmolVLMImageProcessorPil(**settings_of(folder))


def pixtral_processor(folder: Path, vision: Vision) -> Any:
    module = import_module("mlx_vlm.models.pixtral.image_processing_pixtral")
    settings = settings_of(folder)
    cell = settings["patch_size"] * settings.get("spatial_merge_size", 1)
    return module.PixtralImageProcessor(**{**settings, "patch_size": cell})


class Lfm2Processor:
    def __init__(self, folder: Path, vision: Vision) -> None:
        module = import_module("mlx_vlm.models.lfm2_vl.processing_lfm2_vl")
        self.own = module.Lfm2VlNumpyImageProcessor(**settings_of(folder))

    def __call__(self, images: Sequence[Any]) -> dict[str, Any]:
        names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
        return {name: value for name, value in self.own(images).items() if name in names}


def siglip_processor(folder: Path, vision: Vision) -> Any:
    module = import_module("transformers.models.siglip.image_processing_pil_siglip")
    return StackedPixels(module.SiglipImageProcessorPil(**settings_of(folder)))


class PrefixModel:
    """Computes a prompt once, since its tokens see each other, but not the answer; and all of its
    pictures, of which mlx-vlm takes the first one."""

    def __init__(self, own: Any) -> None:
        cache, tower = import_module("mlx_vlm.models.cache"), own.vision_tower
        self.own, self.cache = own, [cache.KVCache() for _ in own.layers]
        own.vision_tower = lambda pixels, **_: (
            mx.concatenate([tower(pixels[at : at + 1])[0] for at in range(len(pixels))]),
            *(None, None),
        )

    def __call__(self, ids: mx.array, pixels: mx.array, **_: Any) -> Any:
        if self.cache[0].offset:
            return self.own.language_model(ids[:, -1:], cache=self.cache)
        return self.own(ids, pixels, mask=mx.ones(ids.shape), cache=self.cache)


class HunyuanModel:
    """Tells mlx-vlm's model the positions that its processor makes, with a picture's number where
    it has 0 for all, as transformers. In mlx-vlm's tower, pictures see each other."""

    def __init__(self, own: Any) -> None:
        self.own, tower, made = own, own.vision_tower, list[Any]()

        def apart(pixels: mx.array, grids: mx.array) -> Any:
            counts: Any = mx.cumsum(grids.prod(1))[:-1].tolist()
            parts = mx.split(pixels, counts)
            pairs = zip(parts, mx.split(grids, len(parts)), strict=True)
            made[:] = made or [mx.concatenate([tower(*pair) for pair in pairs], 1)]
            return made[0]

        own.vision_tower = apart

    def __call__(self, ids: mx.array, pixels: mx.array, image_grid_thw: mx.array, **_: Any) -> Any:
        module = import_module("mlx_vlm.models.hunyuan_vl.processing_hunyuan_vl")
        processor = object.__new__(module.HunYuanVLProcessor)
        images = module.HunYuanVLImageProcessor()
        images.preprocess = lambda grids: {"image_grid_thw": grids}
        vars(processor).update(
            image_processor=images,
            tokenizer=lambda *_, **__: {"input_ids": ids.tolist()},
            image_token="i",
            placeholder_token="p",
            image_token_id=self.own.config.image_token_id,
            im_start_token_id=-1,
            im_end_token_id=-1,
            pad_id=-1,
        )
        positions = processor(np.array(image_grid_thw), "i" * len(image_grid_thw))["position_ids"]
        inside = positions[0, 3] == 0
        inside[0] = False  # a token of text
        number = np.cumsum(inside & ~np.roll(inside, 1)) - 1
        positions[0, 3] = np.where(inside, number, positions[0, 3])
        given = {"image_grid_thw": image_grid_thw, "position_ids": mx.array(positions)}
        return self.own(ids, pixels, **given)


class Gemma4Processor:
    def __init__(self, folder: Path, vision: Vision) -> None:
        self.module = import_module("mlx_vlm.models.gemma4.processing_gemma4")
        unified = import_module("mlx_vlm.models.gemma4_unified").ImageProcessor
        is_unified = folder.name == "gemma4_unified"
        own = unified if is_unified else self.module.Gemma4ImageProcessor
        self.own = own(**settings_of(folder))

    def __call__(self, images: Sequence[Any]) -> dict[str, Any]:
        return dict(self.own(images)[0])


class WholeProcessor:
    def __init__(self, folder: Path, vision: Vision) -> None:
        import_module(f"mlx_vlm.models.{folder.name}")
        self.own = import_module("transformers").AutoProcessor.from_pretrained(str(folder))
        self.fails_at_several = folder.name == "paddleocr_vl"

    def __call__(self, images: Sequence[Any]) -> dict[str, Any]:
        kinds = ("image_placeholder_token", "image_token")
        text = next(filter(None, (getattr(self.own, name, "") for name in kinds)), "")
        together = [[image] for image in images] if self.fails_at_several else [images]
        made = [self.own(text=[text * len(each)], images=each) for each in together]
        names = made[0].keys() - {"input_ids", "attention_mask"}
        arrays = {name: [np.array(each[name]) for each in made] for name in names}
        for places in arrays.get("image_input_idx", []):
            places[places >= 0] += 4  # tokens of text
        return {
            name: np.concatenate(own, int(own[0].ndim == 5)) if len(own) > 1 else own[0]
            for name, own in arrays.items()
        }


PROCESSORS: Mapping[str, Callable[[Path, Vision], Any]] = {
    "qwen2_vl": qwen_processor,
    "qwen2_5_vl": qwen_processor,
    "qwen3_vl": qwen_processor,
    "qwen3_vl_moe": qwen_processor,
    "qwen3_5": qwen_processor,
    "glm4v": glm_processor,
    "glm4v_moe": glm_processor,
    "hunyuan_vl": hunyuan_processor,
    "internvl": intern_processor,
    "internvl_chat": intern_processor,
    "kimi_vl": kimi_processor,
    "llava": llava_processor,
    "llava_padded": llava_processor,
    "gemma3n": siglip_processor,
    "paligemma": siglip_processor,
    "paligemma_1": siglip_processor,
    "smolvlm": smolvlm_processor,
    "idefics3": smolvlm_processor,
    "gemma4": Gemma4Processor,
    "gemma4_unified": Gemma4Processor,
    "lfm2_vl": Lfm2Processor,
    "pixtral": pixtral_processor,
    "mistral3": pixtral_processor,
    **dict.fromkeys((*WHOLE_FAMILIES, *BORROWING), WholeProcessor),
}
"""mlx-vlm's image processors. Gemma 3 is compared with transformers' answers instead: in mlx-vlm,
the tokens of a picture do not see each other."""


def qwen_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    return int(processor.num_image_tokens(*size[::-1]))


def glm_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    return int(processor.get_number_of_image_patches(*size[::-1], {})) // 4


def hunyuan_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    return int(processor.get_number_of_image_patches(*size[::-1]))


def llava_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    return (int(processor.own.crop_size["height"]) // 16) ** 2


def kimi_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    wide, high = processor.rescale(Image.new("RGB", size)).size
    return int(wide // 28 * (high // 28))


def intern_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    return 4 * int(processor.own.get_number_of_image_patches(*size[::-1]))


def smolvlm_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    module = import_module("mlx_vlm.models.smolvlm.processing_smolvlm")
    made = processor([Image.new("RGB", size)], return_row_col_info=True)
    tiles, between = (made["rows"][0][0], made["cols"][0][0]), "<fake_token_around_image>"
    whole = module.get_image_prompt_string(*tiles, 4, between, "<image>", "<global-img>")
    layout = vision.layout([chain[-1] for chain in vision.shown().resizes(*size)])
    assert "".join("<image>" * part if isinstance(part, int) else part for part in layout) == whole
    return int(whole.count("<image>"))


def pixtral_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    module = import_module("mlx_vlm.models.pixtral.image_processing_pixtral")
    longest, cell = processor.size["longest_edge"], processor.patch_size
    high, wide = module.get_resize_output_image_size(size[::-1], longest, cell)
    return int(high // cell * (wide // cell))


def gemma4_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    resized = processor.module.get_aspect_ratio_preserving_size
    own, pool = processor.own, processor.own.pooling_kernel_size
    most = own.max_soft_tokens * pool**2
    high, wide = resized(*size[::-1], own.patch_size, most, pool)
    return int(high * wide // (own.patch_size * pool) ** 2)


def lfm2_tokens(processor: Any, vision: Vision, size: tuple[int, int]) -> int:
    own = processor.own
    views_of = vars(type(own))["_views_for_image"]
    views, rows, columns, whole = views_of(own, Image.new("1", size), True, 2, 10, True)
    assert len(views) == (rows * columns + 1 if rows * columns > 1 else 1)
    cell = own.encoder_patch_size * own.downsample_factor
    tiles = rows * columns * (own.tile_size // cell) ** 2 if len(views) > 1 else 0
    return int(tiles + whole[0] // cell * (whole[1] // cell))


SIZES: Mapping[str, Callable[[Any, Vision, tuple[int, int]], int]] = {
    "qwen2_5_vl": qwen_tokens,
    "qwen3_vl": qwen_tokens,
    "glm4v": glm_tokens,
    "hunyuan_vl": hunyuan_tokens,
    "internvl": intern_tokens,
    "kimi_vl": kimi_tokens,
    "llava": llava_tokens,
    "smolvlm": smolvlm_tokens,
    "gemma4": gemma4_tokens,
    "gemma4_unified": gemma4_tokens,
    "lfm2_vl": lfm2_tokens,
    "pixtral": pixtral_tokens,
    "mistral3": pixtral_tokens,
}
"""How many image tokens mlx-vlm gives a picture of a size."""
