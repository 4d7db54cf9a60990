"""Models that see: the tower, the pictures' tokens, and rows with and without pictures in one
batch."""

import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_server import limits
from mlx_server.engine.messages import Generate
from mlx_server.generation.pictures import ShownPicture, expanded, with_vocabulary
from mlx_server.models.architectures import INSTALL
from mlx_server.models.tokenizer import Tokenizer, read_tokenizer
from mlx_server.models.vision import (
    USED_NAMES,
    Borrowed,
    Vision,
    borrowing,
    can_see,
    packed_stamp,
    tower_bytes,
    vision_of,
    within_memory,
)
from mlx_server.prompts.template_prompt import RenderedPrompt
from mlx_server.requests import SamplingParams
from mlx_server.system.sandbox.files import FileRefused, processed
from mlx_server.system.sandbox.picture_recipes import OneSquare, PatchGrid
from mlx_server.worker import weights
from mlx_server.worker.batch import Batch
from mlx_server.worker.kv_caches import set_kv_bits
from mlx_server.worker.lora_adapters import AdapterWeights
from mlx_server.worker.picture_processor import BorrowedProcessor
from mlx_server.worker.prompt_store import PromptStore
from mlx_server.worker.rows import check_row
from mlx_server.worker.sight import RowPictures, Sight, sight_of
from mlx_server.worker.vision_towers import make_tower, package_of
from tests.drained import drained
from tests.tables import cases
from tests.tiny import tokenizer
from tests.tiny_vision import (
    BORROWING,
    FURTHER,
    LLAVA,
    VISION_FAMILIES,
    WHOLE_FAMILIES,
    tiny_vision,
)
from tests.worker.batch_runs import GREEDY, Steady, a_prompt
from tests.worker.lora_files import mlx_adapter

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
pytestmark = pytest.mark.skipif(not can_see(), reason="the extra `vision` is not installed")

FAMILIES = [*VISION_FAMILIES, *WHOLE_FAMILIES]
COUNT = 6
"""The tokens of an answer."""
BEFORE, BETWEEN, AFTER = [1, 40, 41, 259], [261, 42, 43, 259], [261, 44, 45, 2, 1, 46]
"""Text around pictures: 259 and 261 begin and end one."""


def load(folder: Path, *, sees: bool = True) -> Any:
    return drained(weights.load(folder, sees=sees))[0]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp("vision") / request.param, request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny_vision(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def gemma(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any]:
    folder = tiny_vision(tmp_path_factory.mktemp("gemma"), request.param)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["text_config"]["use_bidirectional_attention"] = "vision"  # as large models of Gemma 4
    (folder / "config.json").write_text(json.dumps(config))
    return request.param, load(folder)


def sight(model: Any) -> Sight:
    found = sight_of(model)
    assert found
    return found


def image(seed: int, width: int = 90, height: int = 60) -> Any:
    noise = np.random.default_rng(seed).integers(0, 255, (6, 9, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), 3)


@pytest.fixture(scope="session", autouse=True)
def _tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer(FURTHER).save(str(path))
    TOKENIZERS.append(read_tokenizer(path))


TOKENIZERS: list[Tokenizer] = []


def shown(image: Any, vision: Vision) -> ShownPicture:
    from mlx_server.system.sandbox.picture_child import resized

    if isinstance(recipe := vision.recipe, Borrowed):
        made, inputs = processed(recipe.folder, recipe.stamp, image.size, image.tobytes())
        return ShownPicture(sha256(image.tobytes()).digest(), [], inputs, made.ids)
    chains = vision.shown().resizes(*image.size)
    views = [resized(image, sizes, vision.filter) for sizes in chains]
    pixels = b"".join(view.tobytes() for view in views)
    return ShownPicture(sha256(pixels).digest(), [view.size for view in views], pixels)


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
    begins = vision.sees_whole == "prompt"
    tokens = [] if begins and images else [*before]
    for number in range(len(images)):
        tokens += [*(BETWEEN if number and not begins else []), vision.token]
    pictures = [shown(each, vision) for each in images]
    rendered = RenderedPrompt([*tokens, *after] if images else [*tokens, 1, 2])
    prompt = expanded(rendered, pictures, vision, TOKENIZERS[0])
    assert prompt
    pictured = list(prompt.pictures)
    return Generate(row, "m", prompt.tokens, COUNT, [], sampling, pictures=pictured)


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


def answer(batch: Batch, asked: Generate) -> list[Any]:
    batch.add(asked)
    found: list[Any] = []
    while batch:
        found += batch.step().tokens
    return found


def alone(model: Any, asked: Generate) -> list[int]:
    return [token.id for token in answer(Batch(model, concurrency=1), asked)]


TRUTH = {
    (truth := json.loads(line))["family"]: truth
    for line in Path(__file__).with_name("vision_truth.jsonl").read_text("utf-8").splitlines()
}
"""Answers of mlx-vlm 0.7.10 and transformers 5.24 on the same weights, with the likeliest tokens of
the last place, and how many tokens they give pictures of some sizes: `mlx_vlm_reference.py` of
commit 62bdf3b1 asks them."""


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_are_those_of_mlx_vlm(folder: Path, model: Any, count: int) -> None:
    known = TRUTH.get(folder.name, {"answers": []})["answers"]
    if len(known) < count:
        pytest.skip("compared with transformers' answers, or takes one picture in mlx-vlm")
    truth = known[count - 1]
    images = [image(1), image(2, 200, 80)][:count]
    sampling = SamplingParams(temperature=0, logprobs=5)
    asked = ask(1, images, sight(model).vision, sampling=sampling)
    found = answer(Batch(model, concurrency=1), asked)[: len(truth["ids"])]
    assert [token.id for token in found] == truth["ids"]
    top = {int(id): value for id, value in truth["top"].items()}
    assert dict(found[-1].logprobs.top) == pytest.approx(top, abs=1e-3)
    asked.deterministic = True  # whose last token is computed in another pass
    assert alone(model, asked)[: len(truth["ids"])] == truth["ids"]


TRUTHS = {
    family: json.loads((Path(__file__).parent / f"{family}_truth.json").read_text("utf-8"))
    for family in ("gemma3", "gemma4")
}
"""Answers of transformers on the same weights: `gemma_truth.py` of commit 62bdf3b1 asks it."""


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_tokens_of_gemma_are_those_of_transformers(
    gemma: tuple[str, Any], number: int, is_deterministic: bool
) -> None:
    family, model = gemma
    truth, vision = TRUTHS[family][number], sight(model).vision
    sampling = SamplingParams(temperature=0, logprobs=5)
    asked = ask(1, [image(*each) for each in truth["images"]], vision, sampling=sampling)
    prompt = RenderedPrompt(asked.prompt, pictures=tuple(asked.pictures))
    assert with_vocabulary(prompt, vision.token) == truth["ids"]
    asked.deterministic = is_deterministic
    # pieces are smaller than a picture
    found = answer(Batch(model, concurrency=1, budget=Steady(5)), asked)
    assert [token.id for token in found] == truth["answer"][:COUNT]
    for token, logprobs in zip(found, truth["logprobs"][:COUNT], strict=True):
        known = {int(id): value for id, value in logprobs.items()}
        assert dict(token.logprobs.top) == pytest.approx(known, abs=1e-3)


def test_a_picture_has_as_many_tokens_as_mlx_vlm_gives_it(folder: Path, model: Any) -> None:
    truth, vision = TRUTH.get(folder.name, {}), sight(model).vision
    dice = np.random.default_rng(0)
    sides = ([int(2 ** dice.uniform(3, 11.8)) for _ in range(2)] for _ in range(200))
    even = (pair for pair in sides if max(pair) <= 200 * min(pair))
    layouts = list[str]()
    for (high, wide), count in zip(even, truth.get("counts", ()), strict=False):
        layout = vision.layout([chain[-1] for chain in vision.shown().resizes(wide, high)])
        found = sum(part for part in layout if isinstance(part, int))
        assert found == count or not count  # a side may have no pixel left in mlx-vlm
        layouts += [part if isinstance(part, str) else "<image>" * part for part in layout]
    if "layouts" in truth:
        assert crc32("".join(layouts).encode()) == truth["layouts"]


def test_rows_with_and_without_pictures_are_answered_as_alone(model: Any) -> None:
    vision = sight(model).vision
    asks = [
        ask(1, [image(1)], vision),
        text(2, 45),
        ask(3, [image(2), image(3, 200, 80)], vision),
        text(4, 5),
        ask(5, [image(2), image(3)], vision),
    ]
    found = answers(Batch(model, concurrency=8), asks)
    assert found == [alone(model, each) for each in asks]


@pytest.mark.parametrize("times", [1, 4])
def test_a_tower_takes_no_more_memory_than_is_counted_for_it(
    folder: Path, model: Any, times: int
) -> None:
    """The peak of a picture with as many pixels and tokens as the files allow, and 4 times more
    where they decide on them."""
    if folder.name in BORROWING:  # its tower keeps what it makes for its first picture
        model = load(folder)
    vision = sight(model).vision
    if times > 1 and not isinstance(vision.recipe, PatchGrid):
        pytest.skip("a fixed number of tokens")
    if isinstance(vision.recipe, PatchGrid):
        more = msgspec.structs.replace(vision.recipe, most=times * vision.recipe.most)
        vision = replace(vision, recipe=more)
    if isinstance(vision.recipe, Borrowed):
        vision = borrowing(vision, "")
    asked = ask(1, [image(70 + times, 900, 900)], vision)
    owner = RowPictures(asked, vision)
    shown, sight(model).vision = sight(model).vision, vision
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    while sight(model).encode(owner, 0, lambda: False):
        pass
    if vision.sees_whole == "prompt":
        alone(model, ask(2, [image(1)], vision, after=a_prompt(limits.PREFIX_TOKENS)))
    peak = mx.get_peak_memory() - before
    sight(model).vision = shown
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert 0.9 * peak < tower_bytes(vision, config, upcast=True) < 10 * peak


def test_the_picture_decides_on_the_answer(qwen: Any) -> None:
    vision = sight(qwen).vision
    found = [alone(qwen, ask(1, [image(seed)], vision)) for seed in range(4)]
    assert len({*map(tuple, found)}) == 4


def test_a_second_turn_computes_no_vision_and_only_new_text(model: Any) -> None:
    vision, batch = sight(model).vision, Batch(model, concurrency=4, prompts=PromptStore(1 << 28))
    images = [image(11), image(12)]
    first = ask(1, images, vision)
    (told,) = answers(batch, [first])
    before = sight(model).computed
    said = [id for id in told if id != vision.token]
    second = ask(2, images, vision, after=[*AFTER, *said, 50, 51])
    batch.add(second)
    cached = 0
    found: list[int] = []
    while batch:
        done = batch.step()
        cached += sum(each.cached_tokens for each in done.prefilled)
        found += [token.id for token in done.tokens]
    assert sight(model).computed == before
    if vision.sees_whole == "prompt":  # nothing holds for a longer prompt
        assert cached == 0
        batch.add(first)
        assert [each.cached_tokens for each in batch.step().prefilled] == [len(first.prompt) - 1]
    else:
        assert cached >= len(first.prompt) - 1
    assert found == alone(model, second)


def test_a_stream_gets_tokens_between_the_layers_of_a_tower(qwen: Any) -> None:
    budget = Steady(64)
    budget.schedule = replace(budget.schedule, longest_gap=0.0)
    batch = Batch(qwen, concurrency=4, budget=budget)
    stream = text(1, 5)
    stream.max_tokens = 20
    batch.add(stream)
    while not batch.decoding:
        batch.step()
    seen = ask(2, [image(41)], sight(qwen).vision)
    batch.add(seen)
    steps: list[int] = []
    """How many tokens the stream got before the picture's row had a first piece."""
    while not (done := batch.step()).progress:
        steps.append(len(done.tokens))
    assert sum(steps) >= len(sight(qwen).tower.vision_tower.blocks)
    found = [token.id for token in done.tokens if token.row == 2]
    while batch:
        found += [token.id for token in batch.step().tokens if token.row == 2]
    assert found == alone(qwen, seen)


def test_another_picture_in_the_same_place_shares_only_what_is_before_it(qwen: Any) -> None:
    vision, batch = sight(qwen).vision, Batch(qwen, concurrency=4, prompts=PromptStore(1 << 28))
    before = [*a_prompt(60), 259]
    answers(batch, [ask(1, [image(21)], vision, before=before)])
    batch.add(ask(2, [image(22)], vision, before=before))
    done = batch.step()
    assert [each.cached_tokens for each in done.prefilled] == [len(before)]


def test_a_preempted_row_sees_its_pictures_again(model: Any) -> None:
    vision, batch = sight(model).vision, Batch(model, concurrency=4)
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
    assert found == alone(model, asked)


def test_penalties_pass_over_pictures(qwen: Any) -> None:
    penalties = SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5)
    vision = sight(qwen).vision
    assert len(alone(qwen, ask(1, [image(1)], vision, sampling=penalties))) == COUNT


def calls_of_a_step(batch: Batch, asks: Sequence[Generate]) -> float:
    """The calls of Python functions in a step that decodes these rows: the median of ten."""
    asks = asks[:1] if batch.why_alone else asks
    for each in asks:
        each.max_tokens = 20
        batch.add(each)
    while batch.decoding < len(asks):
        batch.step()
    batch.step()
    counts = [0]

    def counting(_: Any, event: str, __: Any) -> None:
        counts[-1] += event == "call"

    before = sys.getprofile()
    for _ in range(10):
        sys.setprofile(counting)
        try:
            batch.step()
        finally:
            sys.setprofile(before)
        counts.append(0)
    return median(counts[:-1])


def test_a_step_of_text_costs_what_it_costs_a_model_that_does_not_see(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    ids, blind = mx.array([a_prompt(40)]), load(folder, sees=False)
    assert sight_of(blind) is None
    alone(model, ask(1, [image(1)], sight(model).vision))
    graphs = list[Any]()
    for each in (model, blind):
        mx.eval(each(ids))  # and with it what layers have for all passes
        with (tmp_path / "graph").open("w") as file:
            logits = each(ids)
            mx.export_to_dot(file, logits)
        graphs += re.findall(r'label ="(\w+)"', (tmp_path / "graph").read_text()), logits
    assert len(graphs[0]) > 100
    assert graphs[0] == graphs[2]
    assert mx.array_equal(graphs[1], graphs[3])
    asks = [text(row, 20 + row) for row in range(3)]
    own, other = (calls_of_a_step(Batch(each, concurrency=4), asks) for each in (model, blind))
    assert own <= 1.02 * other


WRONG: Mapping[str, Any] = {
    "its pixels are cut": lambda p: {"pixels": p.pixels[:-1]},
    "it has no pixels": lambda p: {"sizes": [(0, 0)], "pixels": b""},
    "it has another size": lambda p: {"sizes": [p.sizes[0][::-1]], "pixels": p.pixels[: 3 * 64]},
    "it has further tokens": lambda p: {"tokens": p.tokens + 1},
    "it has no tokens": lambda p: {"tokens": 0},
    "it is elsewhere": lambda p: {"at": p.at + 1},
    "it is before the prompt": lambda p: {"at": -9},
    "it is after the prompt": lambda p: {"at": 999},
    "it is another one": lambda p: {"digest": b"x"},
    "it has a text": lambda p: {"texts": [(0, 5)]},
}


@pytest.mark.parametrize("how", WRONG)
def test_a_picture_that_does_not_fit_its_prompt_is_refused(qwen: Any, how: str) -> None:
    batch = Batch(qwen, concurrency=1)
    asked = ask(1, [image(1)], sight(qwen).vision)
    check_row(asked, batch)
    (picture,) = asked.pictures
    asked.pictures = [msgspec.structs.replace(picture, **WRONG[how](picture))]
    with pytest.raises(ValueError, match="picture"):
        check_row(asked, batch)


def test_ids_of_pictures_need_a_picture(qwen: Any, tiny_model: Any) -> None:
    batch = Batch(qwen, concurrency=1)
    asked = ask(1, [image(1)], sight(qwen).vision)
    with pytest.raises(ValueError, match="sees no pictures"):
        check_row(asked, Batch(tiny_model, concurrency=1))
    (picture,) = asked.pictures
    asked.prompt = asked.prompt[: picture.at + picture.tokens]
    with pytest.raises(ValueError, match="no token follows"):
        check_row(asked, batch)
    asked.pictures = []
    with pytest.raises(ValueError, match="outside the vocabulary"):
        check_row(asked, batch)


def test_settings_of_a_tower_may_be_damaged(tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "preprocessor_config.json").write_text('{"size": 5, "patch_size": "x"}')
    vision = vision_of(folder, config)
    assert vision
    assert isinstance(vision.recipe, PatchGrid)
    assert (vision.recipe.patch, vision.recipe.merge) == (16, 2)
    assert vision_of(folder, {**config, "vision_config": None}) is None
    assert vision_of(folder, {**config, "image_token_id": "5"}) is None
    (folder / "preprocessor_config.json").write_text(
        '{"do_pad": true, "image_mean": [NaN, -9.0, 1e999]}'
    )
    llava = {**LLAVA.config, "model_type": "llava", "vision_config": LLAVA.tower}
    square = vision_of(folder, llava)
    assert square
    assert isinstance(square.recipe, OneSquare)
    assert square.recipe.frame == (0, 0, 255)


PUBLISHED = [
    json.loads(line)
    for line in (Path(__file__).parent / "published_vision.jsonl").read_text("utf-8").splitlines()
]
"""Settings of published checkpoints, and the image tokens of a picture of 1600 x 1200."""


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published["name"])
def test_published_settings_make_both_models(published: Any, tmp_path: Path) -> None:
    config = published["config"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(published["image"]))
    vision = vision_of(tmp_path, config)
    assert vision
    make_tower(config, vision.family.package)  # MLX makes no weights before they are needed
    model, arguments = weights.model_classes(json.loads(json.dumps(config)))
    model(arguments.from_dict(json.loads(json.dumps(config))))
    sizes = [chain[-1] for chain in vision.shown().resizes(1600, 1200)]
    layout = vision.layout(sizes)
    assert sum(part for part in layout if isinstance(part, int)) == published["tokens"]
    assert vision.sees_whole == published.get("sees_whole", vision.sees_whole)


@pytest.mark.parametrize(("kind", "turned"), [("phi3", 1.0), ("glm4v_text", 0.5)])
def test_how_much_of_a_head_is_turned_if_settings_leave_it_out(kind: str, turned: float) -> None:
    text = {"model_type": kind, "max_position_embeddings": 4096, "attention_bias": True}
    text |= {"num_key_value_heads": 2, "rope_theta": 1e4}
    _, arguments = weights.model_classes({"model_type": "internvl_chat", "llm_config": text})
    assert arguments.from_dict({}).partial_rotary_factor == turned


@cases
def test_what_is_missing_to_see_is_logged_with_the_command_that_installs_it(
    modules: list[str],
    installed: str,
    names: Mapping[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(
        "mlx_server.models.vision.find_spec",
        lambda name: None if name in modules else find_spec(name),
    )
    monkeypatch.setattr("mlx_server.models.vision.USED_NAMES", {**USED_NAMES, **names})
    monkeypatch.setattr("mlx_server.models.vision.version", lambda _: installed)
    with caplog.at_level("WARNING"):
        assert can_see.__wrapped__() is not bool(why)
    assert why in caplog.text
    assert (INSTALL in caplog.text) is bool(why)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model, found: setattr(model.language_model, "_row", found), "keeps what it knows"),
        (lambda model, found: setattr(found, "rope_deltas", 1), "also takes rope_deltas"),
        (
            lambda model, found: setattr(found, "inputs_embeds", found.inputs_embeds[:, 1:]),
            "it makes 21 tokens of 22",
        ),
    ],
)
def test_a_model_that_would_see_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Any, why: str
) -> None:
    folder = tiny_vision(tmp_path, "molmo2")
    assert BorrowedProcessor(folder).inputs(np.zeros((60, 60, 3), np.uint8))[0].ids
    kind = package_of("molmo2").Model
    own = kind.get_input_embeddings

    def changed(self: Any, *given: Any, **named: Any) -> Any:
        found = own(self, *given, **named)
        change(self, found)
        return found

    monkeypatch.setattr(kind, "get_input_embeddings", changed)
    with pytest.raises(ValueError, match=why):
        BorrowedProcessor(folder)


def test_a_picture_that_a_processor_does_not_take_is_too_narrow(tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path, "molmo")
    with pytest.raises(FileRefused, match="is too small or too narrow for mlx-vlm's processor"):
        processed(folder, packed_stamp(folder), (3000, 20), bytes(3 * 3000 * 20))


def test_no_processor_runs_code_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules: Any = import_module("transformers.dynamic_module_utils")
    monkeypatch.setattr(modules, "get_cached_module_file", modules.get_cached_module_file)
    folder, ran = tiny_vision(tmp_path, "molmo2"), tmp_path / "ran"
    BorrowedProcessor(folder)
    (folder / "evil.py").write_text(f"import absent\nopen({str(ran)!r}, 'w')\nclass Evil: pass\n")
    settings = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizers: Any = import_module("transformers").AutoTokenizer
    with pytest.raises(ValueError, match="code of its own, which mlx-server never runs"):
        tokenizers.from_pretrained(str(folder), trust_remote_code=True)  # as some processors do
    assert not ran.exists()


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, name)
        yield from places(inner, (*path, name))


WRONG_SETTINGS: tuple[Any, ...] = (0, 1, -(10**9), 10**18, "x", math.inf, {})


def test_no_setting_takes_a_picture_beyond_the_limits(folder: Path, tmp_path: Path) -> None:
    if folder.name in (*WHOLE_FAMILIES, *BORROWING):
        pytest.skip("the limits are those of the process")
    names = ("config.json", "preprocessor_config.json", "processor_config.json")
    files = {
        name: json.loads((folder / name).read_text()) for name in names if (folder / name).is_file()
    }
    for path in places(files):
        for name, value in files.items():
            (tmp_path / name).write_text(json.dumps(value))
        for wrong in WRONG_SETTINGS if len(path) > 1 and "text_config" not in path else ():
            changed = json.loads(json.dumps(files))
            at = changed
            for name in path[:-1]:
                at = at[name]
            at[path[-1]] = wrong
            (tmp_path / path[0]).write_text(json.dumps(changed[path[0]]))
            if (vision := vision_of(tmp_path, changed["config.json"])) is None:
                continue
            fitting, nbytes = within_memory(vision, changed["config.json"], upcast=True)
            assert nbytes <= limits.TOWER_BYTES
            assert fitting or not nbytes
            for size in ((90, 60), (60_000, 300), (1, 1), (4472, 4472)):
                sizes = [chain[-1] for chain in vision.shown().resizes(*size)]
                layout = vision.layout(sizes)
                count = sum(part if isinstance(part, int) else 1 for part in layout)
                assert 0 < count < 9 * limits.PICTURE_TOKENS, (path, wrong)
                assert sum(w * h for w, h in sizes) < 3 * limits.PICTURE_PIXELS, (path, wrong)


@pytest.mark.parametrize("family", ["qwen3_5", "molmo2"])
def test_an_adapter_and_a_cache_of_8_bits_go_with_pictures(tmp_path: Path, family: str) -> None:
    folder = tiny_vision(tmp_path / "model", family)
    model = load(folder)
    adapters, vision = AdapterWeights(model), sight(model).vision
    adapters.load("a", mlx_adapter(tmp_path / "adapter", folder, scale=4.0))
    set_kv_bits(model, 8)
    asks = [ask(row, [image(1)], vision) for row in (1, 2)]
    asks[1].adapter = "a"
    found = answers(Batch(model, concurrency=4), [*asks, text(3, 30)])
    assert found == [alone(model, each) for each in (*asks, text(3, 30))]
    assert found[0] != found[1]


RENAMED = {
    "glm4v": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.visual.",
    },
    "gemma3n": {"model.language_model.": "language_model.model."},
    "hunyuan_vl": {"language_model.model.": "model.", "vision_tower.": "vit."},
}
"""The names of transformers, and those of mlx-vlm, by what mlx-lm has in their place."""


@pytest.mark.parametrize("family", RENAMED)
def test_a_checkpoint_may_have_other_names(tmp_path: Path, family: str) -> None:
    folder = tiny_vision(tmp_path, family)
    before = load(folder)
    tensors: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    for begin, other in RENAMED[family].items():
        assert any(name.startswith(begin) for name in tensors)
        tensors = {re.sub(f"^{begin}", other, name): array for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    asked = ask(1, [image(1)], sight(before).vision)
    assert alone(load(folder), asked) == alone(before, asked)


def test_a_quantised_checkpoint_sees(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / folder.name))
    own = load(copied)
    asked = ask(1, [image(1)], sight(own).vision)
    weights = dict[str, mx.array]()
    for part in (own, sight(own).tower):
        nn.quantize(part, 32, 8, class_predicate=lambda _, layer: is_quantised(layer))
        weights |= dict(tree_flatten(part.parameters()))
    mx.save_safetensors(str(copied / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((copied / "config.json").read_text("utf-8"))
    config["quantization"] = {"group_size": 32, "bits": 8, "mode": "affine"}
    (copied / "config.json").write_text(json.dumps(config))
    assert alone(load(copied), asked) == alone(own, asked)


def test_a_whole_model_that_keeps_states_runs_one_row_at_a_time(tmp_path: Path) -> None:
    batch = Batch(load(tiny_vision(tmp_path, "zaya1_vl")), concurrency=4)
    assert "keeps the states of one row" in batch.why_alone
    for each in (text(1, 20), text(2, 5)):
        batch.add(each)
    while batch:
        batch.step()
        assert batch.decoding < 2


def is_quantised(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and layer.weight.shape[-1] % 32 == 0


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
