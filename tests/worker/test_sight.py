"""Models that see: the tower, the pictures' tokens, and rows with and without pictures in one
batch."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.engine.messages import FIRST_MEDIA_ID, Generate, Picture, media_ids
from mlx_server.models.vision import Vision, can_see, vision_of
from mlx_server.requests import SamplingParams
from mlx_server.sandbox.files import Grid
from mlx_server.worker import weights
from mlx_server.worker.batch import Batch
from mlx_server.worker.kv_caches import set_kv_bits
from mlx_server.worker.lora_adapters import AdapterWeights
from mlx_server.worker.prompt_store import PromptStore
from mlx_server.worker.rows import check_row
from mlx_server.worker.sight import Sight, sight_of
from tests.tiny import IMAGE_TOKEN, VISION_FAMILIES, tiny_vision
from tests.worker.batch_runs import GREEDY, a_prompt
from tests.worker.lora_files import mlx_adapter

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
pytestmark = pytest.mark.skipif(not can_see(), reason="the extra `vision` is not installed")

FAMILIES = [*VISION_FAMILIES]
COUNT = 8
"""The tokens of an answer."""
BEFORE, BETWEEN, AFTER = [1, 40, 41, 259], [261, 42, 43, 259], [261, 44, 45, 2, 1, 46]
"""Text around pictures: 259 and 261 begin and end one."""


def load(folder: Path) -> Any:
    loading = weights.load(folder, sees=True)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny_vision(tmp_path_factory.mktemp("qwen")))


def sight(model: Any) -> Sight:
    found = sight_of(model)
    assert found
    return found


def image(seed: int, width: int = 90, height: int = 60) -> Any:
    noise = np.random.default_rng(seed).integers(0, 255, (6, 9, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), 3)


def ask(
    row: int,
    images: Sequence[Any],
    vision: Vision,
    *,
    before: Sequence[int] = BEFORE,
    after: Sequence[int] = AFTER,
    sampling: SamplingParams = GREEDY,
) -> Generate:
    """The prompt with these images, and what follows them."""
    prompt, pictures = [*before], list[Picture]()
    for number, each in enumerate(images):
        prompt += BETWEEN if number else []
        width, height = vision.fit().size(*each.size)
        pixels = each.resize((width, height), vision.filter).tobytes()
        digest = sha256(pixels).digest()
        pictures.append(Picture(len(prompt), digest, width, height, pixels))
        prompt += media_ids(digest, vision.count(width, height))
    prompt += after if images else [1, 2]
    return Generate(row, "m", prompt, COUNT, [], sampling, pictures=pictures)


def text(row: int, length: int) -> Generate:
    return Generate(row, "m", a_prompt(length), COUNT, [], GREEDY)


def answers(batch: Batch, asks: Sequence[Generate]) -> list[list[int]]:
    for each in asks:
        batch.add(each)
    ids: dict[int, list[int]] = {each.row: [] for each in asks}
    while batch:
        done = batch.step()
        assert not done.failed
        for token in done.tokens:
            ids[token.row].append(token.id)
    return list(ids.values())


def alone(model: Any, asked: Generate) -> list[int]:
    (answer,) = answers(Batch(model, concurrency=1), [asked])
    return answer


def processor(vision: Vision) -> Any:
    module = import_module("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    return module.Qwen3VLImageProcessor(
        vision.patch, merge_size=vision.merge, min_pixels=vision.least, max_pixels=vision.most
    )


def whole_model(folder: Path) -> Any:
    """mlx-vlm's own."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    package = import_module(f"mlx_vlm.models.{config['model_type']}")
    made = package.ModelConfig.from_dict(config)
    for name, kind in (
        ("text_config", package.TextConfig),
        ("vision_config", package.VisionConfig),
    ):
        if isinstance(given := getattr(made, name), dict):
            setattr(made, name, kind.from_dict(given))
    model = package.Model(made)
    model.load_weights(str(folder / "model.safetensors"))
    model.eval()
    return model


def their_answer(folder: Path, vision: Vision, asked: Generate, images: Sequence[Any]) -> list[int]:
    whole, inputs = whole_model(folder), processor(vision)(images)
    pixels, grid = mx.array(inputs["pixel_values"]), mx.array(inputs["image_grid_thw"])
    ids = [IMAGE_TOKEN if id >= FIRST_MEDIA_ID else id for id in asked.prompt]
    answer: list[int] = []
    for _ in range(asked.max_tokens):
        mask = mx.ones((1, len(ids)))
        output = whole(mx.array([ids]), pixels, mask=None, image_grid_thw=grid, attention_mask=mask)
        answer.append(int(output.logits[0, -1].argmax()))
        ids.append(answer[-1])
    return answer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [1, 2])
def test_tokens_are_those_of_mlx_vlm(folder: Path, model: Any, count: int) -> None:
    vision = sight(model).vision
    images = [image(1), image(2, 130, 60)][:count]
    asked = ask(1, images, vision)
    assert alone(model, asked) == their_answer(folder, vision, asked, images)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_picture_has_as_many_tokens_as_mlx_vlm_gives_it() -> None:
    dice = np.random.default_rng(0)
    for patch in (14, 16):
        vision = Vision(*_settings(patch), (0.5,) * 3, (0.5,) * 3, 3)
        theirs = processor(vision)
        for _ in range(200):
            high, wide = (int(2 ** dice.uniform(3, 11.8)) for _ in range(2))
            if max(high, wide) <= 200 * min(high, wide):
                width, height = Grid(vision.cell, vision.least, vision.most).size(wide, high)
                assert vision.count(width, height) == theirs.num_image_tokens(high, wide)


def _settings(patch: int) -> tuple[Any, int, int, int, int, int]:
    return None, 0, patch, 2, 56 * 56, 28 * 28 * 1280


def test_rows_with_and_without_pictures_are_answered_as_alone(model: Any) -> None:
    vision = sight(model).vision
    asks = [
        ask(1, [image(1)], vision),
        text(2, 45),
        ask(3, [image(2), image(3, 200, 40)], vision),
        text(4, 5),
        ask(5, [image(2), image(3)], vision),
    ]
    found = answers(Batch(model, concurrency=8), asks)
    assert found == [alone(model, each) for each in asks]


def test_the_picture_decides_on_the_answer(qwen: Any) -> None:
    vision = sight(qwen).vision
    found = [alone(qwen, ask(1, [image(seed)], vision)) for seed in range(4)]
    assert len({*map(tuple, found)}) == 4


def test_a_second_turn_computes_no_vision_and_only_new_text(model: Any) -> None:
    vision, batch = sight(model).vision, Batch(model, concurrency=4, prompts=PromptStore(1 << 28))
    images = [image(11), image(12)]
    first = ask(1, images, vision)
    (answer,) = answers(batch, [first])
    before = sight(model).computed
    second = ask(2, images, vision, after=[*AFTER, *answer, 50, 51])
    batch.add(second)
    cached = 0
    found: list[int] = []
    while batch:
        done = batch.step()
        cached += sum(each.cached_tokens for each in done.prefilled)
        found += [token.id for token in done.tokens]
    assert sight(model).computed == before
    assert cached >= len(first.prompt) - 1
    assert found == alone(model, second)


def test_another_picture_in_the_same_place_shares_only_what_is_before_it(qwen: Any) -> None:
    vision, batch = sight(qwen).vision, Batch(qwen, concurrency=4, prompts=PromptStore(1 << 28))
    before = [*a_prompt(60), 259]
    answers(batch, [ask(1, [image(21)], vision, before=before)])
    batch.add(ask(2, [image(22)], vision, before=before))
    done = batch.step()
    assert [each.cached_tokens for each in done.prefilled] == [len(before)]


def test_a_preempted_row_sees_its_pictures_again(qwen: Any) -> None:
    vision, batch = sight(qwen).vision, Batch(qwen, concurrency=4)
    asked = ask(1, [image(31)], vision)
    batch.add(asked)
    found: list[int] = []
    for step in range(100):
        if step == 6:
            batch.preempt(1)
            batch.resume(1)
        found += [token.id for token in batch.step().tokens]
        if not batch:
            break
    assert found == alone(qwen, asked)


def test_penalties_pass_over_pictures(qwen: Any) -> None:
    penalties = SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5)
    vision = sight(qwen).vision
    assert len(alone(qwen, ask(1, [image(1)], vision, sampling=penalties))) == COUNT


def test_text_is_computed_as_by_a_model_that_does_not_see(tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path)
    seeing, ids = load(folder), mx.array([a_prompt(40)])
    loading = weights.load(folder)
    blind: Any = None
    while blind is None:
        try:
            next(loading)
        except StopIteration as end:
            blind = end.value
    assert sight_of(blind) is None
    assert mx.array_equal(seeing(ids), blind(ids))


WRONG: Mapping[str, Any] = {
    "its pixels are cut": lambda p: Picture(p.at, p.digest, p.width, p.height, p.pixels[:-1]),
    "it has no pixels": lambda p: Picture(p.at, p.digest, 0, 0, b""),
    "it has another size": lambda p: Picture(p.at, p.digest, p.height, p.width, p.pixels[: 3 * 64]),
    "it is elsewhere": lambda p: Picture(p.at + 1, p.digest, p.width, p.height, p.pixels),
    "it is before the prompt": lambda p: Picture(-9, p.digest, p.width, p.height, p.pixels),
    "it is after the prompt": lambda p: Picture(999, p.digest, p.width, p.height, p.pixels),
    "it is another one": lambda p: Picture(p.at, b"x", p.width, p.height, p.pixels),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_picture_that_does_not_fit_its_prompt_is_refused(qwen: Any, how: str) -> None:
    batch = Batch(qwen, concurrency=1)
    asked = ask(1, [image(1)], sight(qwen).vision)
    check_row(asked, batch)
    asked.pictures = [WRONG[how](asked.pictures[0])]
    with pytest.raises(ValueError, match="picture"):
        check_row(asked, batch)


def test_ids_of_pictures_need_a_picture(qwen: Any, tiny_model: Any) -> None:
    batch = Batch(qwen, concurrency=1)
    asked = ask(1, [image(1)], sight(qwen).vision)
    with pytest.raises(ValueError, match="sees no pictures"):
        check_row(asked, Batch(tiny_model, concurrency=1))
    asked.pictures = []
    with pytest.raises(ValueError, match="outside the vocabulary"):
        check_row(asked, batch)


def test_settings_of_a_tower_may_be_damaged(tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "preprocessor_config.json").write_text('{"size": 5, "patch_size": "x"}')
    vision = vision_of(folder, config)
    assert vision
    assert (vision.patch, vision.merge) == (16, 2)
    assert vision_of(folder, {**config, "vision_config": None}) is None
    assert vision_of(folder, {**config, "image_token_id": "5"}) is None


def test_an_adapter_and_a_cache_of_8_bits_go_with_pictures(tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path / "model", "qwen3_5")
    model = load(folder)
    adapters, vision = AdapterWeights(model), sight(model).vision
    adapters.load("a", mlx_adapter(tmp_path / "adapter", folder, scale=4.0))
    set_kv_bits(model, 8)
    asks = [ask(row, [image(1)], vision) for row in (1, 2)]
    asks[1].adapter = "a"
    found = answers(Batch(model, concurrency=4), [*asks, text(3, 30)])
    assert found == [alone(model, each) for each in (*asks, text(3, 30))]
    assert found[0] != found[1]


def test_a_model_whose_tower_is_damaged_reads_text(tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path)
    tensors: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    whole = Batch(load(folder), concurrency=1)
    del tensors["vision_tower.merger.norm.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    batch = Batch(load(folder), concurrency=1)
    assert answers(batch, [text(1, 20)]) == answers(whole, [text(1, 20)])
    with pytest.raises(ValueError, match="sees no pictures"):
        check_row(ask(2, [image(1)], sight(whole.model).vision), batch)
