"""Rows of many adapters in one batch: each answers as mlx-lm does with its adapter alone."""

import gc
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlx_server.engine.messages import (
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    CancelRows,
    Generate,
    LoadAdapter,
    LoadModel,
    ModelLoaded,
    Prefilled,
    PromptLogprobs,
    Report,
    RowFailed,
    StepOutput,
    Token,
    UnloadAdapter,
    UnloadModel,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker.prompt_logprobs import prompt_logprobs
from mlx_server.worker.worker import Engine
from tests.worker.batch_runs import CLOSE, Ask, a_prompt, alone, ids
from tests.worker.kinds import GPT_OSS, KINDS, LLAMA, Kind
from tests.worker.lora_files import (
    contents,
    linears_of,
    mlx_adapter,
    network,
    peft_adapter,
    save,
    weakened,
    weights_of,
    with_adapter,
)

GREEDY = SamplingParams(temperature=0)
SEEN = SamplingParams(temperature=0, logprobs=2)
TOKENS = 10
EMBEDDINGS = ("model.embed_tokens", "lm_head")

TIED = Kind("llama-tied", {**LLAMA, "tie_word_embeddings": True})
TIED_4BIT = replace(TIED, name="llama-tied-4bit", quantized={"group_size": 32, "bits": 4})
GPT_OSS_4BIT = Kind("gpt-oss-4bit", GPT_OSS, {"group_size": 32, "bits": 4})
ALIKE = ("llama-8bit", "llama-sharded")
"""What an adapter finds in them it finds in others: layers of llama, quantised or not."""
EVERY_KIND = (*(kind for kind in KINDS if kind.name not in ALIKE), GPT_OSS_4BIT, TIED, TIED_4BIT)


@dataclass(frozen=True)
class RowRequest:
    """One request: what it says, with which adapter and how much of it."""

    prompt: list[int]
    adapter: str | None = None
    scale: float = 1.0


class Desk:
    """One engine with one model, in the test's own process."""

    def __init__(self, path: Path, cache_bytes: int = 0) -> None:
        self.engine = Engine(concurrency=16, cache_bytes=cache_bytes)
        self.answers: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.engine.handle(LoadModel("m", str(path)))
        assert any(isinstance(report, ModelLoaded) for report in self.finish())

    @property
    def model(self) -> Any:
        return self.engine._batches["m"].model

    def load(self, adapter: str, folder: Path) -> Report:
        (report,) = self.engine.handle(LoadAdapter("m", adapter, str(folder)))
        return report

    def loaded(self, **folders: Path) -> "Desk":
        for adapter, folder in folders.items():
            assert isinstance(self.load(adapter, folder), AdapterLoaded)
        return self

    def unload(self, adapter: str) -> None:
        reports = self._noted(self.engine.handle(UnloadAdapter("m", adapter)))
        assert reports[-1] == AdapterUnloaded("m", adapter)

    def begin(self, row_request: RowRequest, tokens: int = TOKENS, **rest: Any) -> int:
        row = len(self.answers)
        self.answers[row] = []
        asked = Generate(row, "m", row_request.prompt, tokens, [], GREEDY, **rest)
        asked.adapter, asked.adapter_scale = row_request.adapter, row_request.scale
        self._noted(self.engine.handle(asked))
        return row

    def step(self) -> list[Report]:
        return self._noted(self.engine.step())

    def finish(self) -> list[Report]:
        reports: list[Report] = []
        while self.engine.pause is not None:
            reports += self.step()
        return reports

    def together(self, row_requests: Sequence[RowRequest], tokens: int = TOKENS) -> list[list[int]]:
        rows = [self.begin(row_request, tokens) for row_request in row_requests]
        self.finish()
        return [self.answers[row] for row in rows]

    def _noted(self, reports: list[Report]) -> list[Report]:
        for report in reports:
            match report:
                case StepOutput(tokens=tokens):
                    for token in tokens:
                        self.answers[token.row].append(token.id)
                case Prefilled(row, cached):
                    self.cached[row] = cached
                case RowFailed(row, message):
                    self.failed[row] = message
        return reports


class Reference:
    """mlx-lm with one adapter, or none, and one row at a time."""

    def __init__(self, path: Path, adapter: Path | None) -> None:
        self.model = with_adapter(path, adapter)

    def answer(self, prompt: list[int], tokens: int = TOKENS) -> list[Token]:
        return alone(self.model, Ask(prompt, tokens, sampling=SEEN))


def assert_same(answer: list[int], reference: list[Token]) -> None:
    """Up to a step where the two likeliest tokens tie: from there both ways are right."""
    assert len(answer) == len(reference)
    for id, token in zip(answer, reference, strict=True):
        assert token.logprobs
        (_, first), (_, second) = token.logprobs.top
        if id != token.id:
            assert first - second < CLOSE
            return


@dataclass(frozen=True)
class Case:
    """A checkpoint, two adapters for all that it has, and the second at half its strength."""

    path: Path
    one: Path
    two: Path
    half: Path

    @property
    def references(self) -> dict[tuple[str | None, float], Reference]:
        folders = {(None, 1.0): None, ("one", 1.0): self.one, ("two", 1.0): self.two}
        folders["two", 0.5] = self.half
        return {use: Reference(self.path, folder) for use, folder in folders.items()}


def a_case(path: Path, folder: Path) -> Case:
    embeddings = [k for k, _ in network(path).named_modules() if k in EMBEDDINGS]
    keys = [*linears_of(path), *embeddings]
    one = mlx_adapter(folder / "one", path, seed=1, keys=keys)
    two = mlx_adapter(folder / "two", path, seed=2, rank=7, keys=keys)
    return Case(path, one, two, weakened(folder / "half", two, 0.5))


@pytest.fixture(scope="module", params=EVERY_KIND, ids=lambda kind: kind.name)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind.name)
    return a_case(kind.save(folder / "base"), folder)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("tied")
    return a_case(TIED.save(folder / "base"), folder)


def mixed() -> list[RowRequest]:
    uses: list[tuple[str | None, float]] = [(None, 1.0), ("one", 1.0), ("two", 1.0), ("two", 0.5)]
    lengths = [5, 40, 300, 2, 70, 9, 33, 1]
    return [RowRequest(a_prompt(n, seed=i), *uses[i % 4]) for i, n in enumerate(lengths)]


@pytest.mark.tables
def test_each_row_answers_as_its_adapter_alone(each: Case) -> None:
    """Prompts short and long: experts sort the tokens of the long ones."""
    references = each.references
    row_requests = mixed()
    for row_request, use in zip(list(row_requests), [*references] * 2, strict=True):
        row_requests.append(replace(row_request, adapter=use[0], scale=use[1]))
    desk = Desk(each.path).loaded(one=each.one, two=each.two)
    answers = desk.together(row_requests)
    for row_request, answer in zip(row_requests, answers, strict=True):
        assert_same(
            answer, references[row_request.adapter, row_request.scale].answer(row_request.prompt)
        )


@pytest.mark.tables
def test_rows_of_one_adapter_answer_as_alone(each: Case) -> None:
    references = each.references
    desk = Desk(each.path).loaded(one=each.one, two=each.two)
    for adapter, scales in [("one", [1.0] * 3), ("two", [0.5] * 3), ("two", [1.0, 0.5, 1.0])]:
        row_requests = [
            RowRequest(a_prompt(40, seed=n), adapter, scale) for n, scale in enumerate(scales)
        ]
        for row_request, answer in zip(row_requests, desk.together(row_requests), strict=True):
            assert_same(
                answer,
                references[row_request.adapter, row_request.scale].answer(row_request.prompt),
            )


def test_the_adapters_change_the_answers(case: Case) -> None:
    prompt = a_prompt(20)
    answers = [ids(reference.answer(prompt)) for reference in case.references.values()]
    assert len({tuple(answer) for answer in answers}) == len(answers)


def test_a_scale_of_nothing_is_the_base(case: Case) -> None:
    desk = Desk(case.path, 1 << 20).loaded(one=case.one)
    prompt = a_prompt(40)
    (base,), (nothing,) = (
        desk.together([RowRequest(prompt)]),
        desk.together([RowRequest(prompt, "one", 0.0)]),
    )
    assert nothing == base
    assert desk.cached == {0: 0, 1: 39}


def test_prompts_of_a_token_or_two_keep_their_adapters(case: Case) -> None:
    references = case.references
    row_requests = [
        RowRequest([7]),
        RowRequest([8, 9], "one"),
        RowRequest([11, 12], "two"),
        RowRequest([3], "two", 0.5),
    ]
    answers = Desk(case.path).loaded(one=case.one, two=case.two).together(row_requests)
    for row_request, answer in zip(row_requests, answers, strict=True):
        assert_same(
            answer, references[row_request.adapter, row_request.scale].answer(row_request.prompt)
        )


Formats = Callable[[Path, Path], Path]
FORMATS: dict[str, Formats] = {
    "plain": lambda folder, adapter: peft_adapter(folder, adapter),
    "rslora": lambda folder, adapter: peft_adapter(folder, adapter, rslora=True),
    "patterns": lambda folder, adapter: peft_adapter(folder, adapter, wide="self_attn.q_proj"),
}


@pytest.mark.tables
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("form", FORMATS)
def test_both_formats_of_an_adapter_agree(
    tiny_path: Path, tmp_path: Path, form: str, dora: bool
) -> None:
    ours = mlx_adapter(tmp_path / "mlx", tiny_path, dora=dora)
    theirs = FORMATS[form](tmp_path / "peft", ours)
    prompts = [a_prompt(30, seed=n) for n in range(3)]
    row_requests = [
        RowRequest(prompt, adapter) for prompt in prompts for adapter in ("ours", "theirs")
    ]
    desk = Desk(tiny_path).loaded(ours=ours, theirs=theirs)
    reference = Reference(tiny_path, ours)
    for row_request, answer in zip(row_requests, desk.together(row_requests), strict=True):
        assert_same(answer, reference.answer(row_request.prompt))


def test_an_embedding_from_peft_leaves_a_shared_head_alone(case: Case, tmp_path: Path) -> None:
    ours = mlx_adapter(tmp_path / "mlx", case.path, keys=["model.embed_tokens"])
    desk = Desk(case.path).loaded(peft=peft_adapter(tmp_path / "peft", ours), ours=ours)
    (peft, mlx) = desk.together([RowRequest(a_prompt(9), "peft"), RowRequest(a_prompt(9), "ours")])
    # the embedding's sum with what was learnt, and the head as it was
    model = network(case.path)
    config, tensors = contents(ours)
    learnt = tensors["model.embed_tokens.lora_a"] @ tensors["model.embed_tokens.lora_b"]
    model.lm_head = type(model.model.layers[0].self_attn.q_proj)(64, 320, bias=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.args.tie_word_embeddings = False
    scale = config["lora_parameters"]["scale"]
    model.model.embed_tokens.weight = model.model.embed_tokens.weight + scale * learnt
    assert_same(peft, alone(model, Ask(a_prompt(9), TOKENS, sampling=SEEN)))
    assert_same(mlx, Reference(case.path, ours).answer(a_prompt(9)))


@pytest.mark.tables
@pytest.mark.parametrize("quantized", [None, {"group_size": 32, "bits": 4}], ids=["f32", "4bit"])
def test_dora_rows_among_others(tmp_path: Path, quantized: dict[str, Any] | None) -> None:
    biased = {**LLAMA, "attention_bias": True, "mlp_bias": True}
    path = Kind("llama", biased, quantized).save(tmp_path / "base")
    dora = mlx_adapter(tmp_path / "dora", path, seed=5, dora=True)
    lora = mlx_adapter(tmp_path / "lora", path, seed=6)
    desk = Desk(path).loaded(dora=dora, lora=lora)
    folders = {None: None, "dora": dora, "lora": lora}
    row_requests = [
        RowRequest(a_prompt(30, seed=n), adapter) for n in range(2) for adapter in folders
    ]
    only = [RowRequest(a_prompt(30), "dora"), RowRequest(a_prompt(31), "dora")]
    for batch in (row_requests, only):
        for row_request, answer in zip(batch, desk.together(batch), strict=True):
            assert_same(
                answer, Reference(path, folders[row_request.adapter]).answer(row_request.prompt)
            )


@pytest.mark.soak
@pytest.mark.parametrize("cache_bytes", [0, 1 << 26], ids=["", "cached"])
@settings(max_examples=3, suppress_health_check=[*HealthCheck])
@given(seed=st.integers(0, 1 << 30))
def test_rows_come_and_go(coming: "Coming", cache_bytes: int, seed: int) -> None:
    """They join, finish and are cancelled at any step; prompts begin alike and are repeated."""
    dice = random.Random(seed)
    desk = Desk(coming.path, cache_bytes).loaded(**coming.folders)
    asked: dict[int, tuple[RowRequest, int]] = {}
    cancelled = set()
    for _ in range(60):
        if dice.random() < 0.3:
            row_request, tokens = coming.row_request(dice), dice.randrange(1, 12)
            asked[desk.begin(row_request, tokens)] = row_request, tokens
        if asked and dice.random() < 0.05:
            row = dice.choice(list(asked))
            cancelled.add(row)
            desk.engine.handle(CancelRows([row]))
        desk.step()
    desk.finish()
    assert not desk.failed
    for row, (row_request, tokens) in asked.items():
        answer = desk.answers[row]
        assert row in cancelled or len(answer) == tokens
        assert_same(answer, coming.answer(row_request)[: len(answer)])


class Coming:
    """What may be asked in a test of rows that come and go, and its answers."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        names = ("a", "b", "c")
        self.folders = {
            name: mlx_adapter(folder / name, path, seed=n, rank=3 + n)
            for n, name in enumerate(names)
        }
        halves = {name: weakened(folder / f"{name}-", self.folders[name], 0.5) for name in names}
        self._references: dict[tuple[str | None, float], Reference] = {
            (None, 1.0): Reference(path, None),
            **{(name, 1.0): Reference(path, self.folders[name]) for name in names},
            **{(name, 0.5): Reference(path, halves[name]) for name in names},
        }
        self._answers: dict[RowRequest, list[Token]] = {}
        self._known: dict[tuple[int, int, str | None, float], list[Token]] = {}
        self._prompts = [
            [*a_prompt(20), *a_prompt(n, seed=s)] for n in (1, 20, 60) for s in range(2)
        ]

    def row_request(self, dice: random.Random) -> RowRequest:
        return RowRequest(dice.choice(self._prompts), *dice.choice(list(self._references)))

    def answer(self, row_request: RowRequest) -> list[Token]:
        which = (
            len(row_request.prompt),
            row_request.prompt[-1],
            row_request.adapter,
            row_request.scale,
        )
        if which not in self._known:
            reference = self._references[row_request.adapter, row_request.scale]
            self._known[which] = reference.answer(row_request.prompt, 12)
        return self._known[which]


@pytest.fixture(scope="module", params=["llama", "gpt-oss"])
def coming(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Coming:
    folder = tmp_path_factory.mktemp(request.param)
    (kind,) = [kind for kind in KINDS if kind.name == request.param]
    return Coming(kind.save(folder / "base"), folder)


def test_a_prompt_is_known_only_to_what_computed_it(case: Case) -> None:
    references = case.references
    prompt = a_prompt(60)
    desk = Desk(case.path, 1 << 26).loaded(one=case.one, two=case.two)
    row_requests = [RowRequest(prompt, *use) for use in references]
    for row_request in row_requests * 2:  # one after the other
        (answer,) = desk.together([row_request])
        assert_same(answer, references[row_request.adapter, row_request.scale].answer(prompt))
    assert list(desk.cached.values()) == [0] * 4 + [59] * 4


def test_other_weights_never_meet_the_old_prompts(case: Case, tmp_path: Path) -> None:
    """A folder that was written anew has another digest, by which its rows call it."""
    folder = tmp_path / "adapter"
    prompt = a_prompt(60)
    desk = Desk(case.path, 1 << 26)
    for digest, source in [("first", case.one), ("second", case.two)]:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        desk.loaded(**{digest: folder})
        (answer,) = desk.together([RowRequest(prompt, digest)])
        assert_same(answer, Reference(case.path, source).answer(prompt))
    assert desk.cached == {0: 0, 1: 0}


def test_what_is_unloaded_leaves_no_prompts_behind(case: Case) -> None:
    desk = Desk(case.path, 1 << 26).loaded(one=case.one, two=case.two)
    row_requests = [RowRequest(a_prompt(60), *use) for use in case.references]
    desk.together(row_requests)
    cache = desk.engine._cache
    kept = cache.nbytes
    desk.unload("two")
    assert cache.nbytes == kept / 2  # two of four
    desk.engine.handle(UnloadModel("m"))
    assert cache.nbytes == 0
    failed = desk.load("one", case.one)
    assert isinstance(failed, AdapterFailed)
    assert "m is not loaded" in failed.message


def test_a_prompt_is_scored_by_its_adapter(case: Case) -> None:
    prompt = a_prompt(150)
    desk = Desk(case.path).loaded(one=case.one, two=case.two)
    for (adapter, scale), reference in case.references.items():
        row_request = RowRequest(prompt, adapter, scale)
        row = desk.begin(row_request, prompt_logprobs=True)
        (scored,) = [report for report in desk.finish() if isinstance(report, PromptLogprobs)]
        exact = list(_scored(reference.model, prompt))
        assert [entry.chosen for entry in scored.logprobs] == pytest.approx(exact, abs=1e-3)
        assert_same(desk.answers[row], reference.answer(prompt))


def _scored(model: Any, prompt: list[int]) -> Iterator[float]:
    scoring = prompt_logprobs(model, prompt, 0)
    while True:
        try:
            next(scoring)
        except StopIteration as end:
            yield from (entry.chosen for entry in end.value[0])
            return


REFUSED = {
    "not loaded": ({"adapter": "other"}, "other is not loaded"),
    "negative": ({"adapter": "one", "adapter_scale": -0.1}, "scale"),
    "too much": ({"adapter": "one", "adapter_scale": 4.1}, "scale"),
    "no number": ({"adapter": "one", "adapter_scale": float("nan")}, "scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_can_not_have_its_adapter_fails_alone(case: Case, name: str) -> None:
    fields, said = REFUSED[name]
    desk = Desk(case.path).loaded(one=case.one)
    row = desk.begin(RowRequest(a_prompt(9), "one"))
    desk.step()
    asked = Generate(99, "m", a_prompt(9), 5, [], GREEDY, **fields)  # type: ignore[arg-type]
    (failed,) = desk.engine.handle(asked)
    assert isinstance(failed, RowFailed)
    assert failed.row == 99
    assert said in failed.message
    desk.finish()
    assert_same(desk.answers[row], Reference(case.path, case.one).answer(a_prompt(9)))


def test_unloading_fails_the_rows_that_use_it_and_no_others(case: Case) -> None:
    desk = Desk(case.path).loaded(one=case.one, two=case.two)
    row_requests = [
        RowRequest(a_prompt(9, seed=n), adapter) for n, adapter in enumerate((None, "one", "two"))
    ]
    decoding = [desk.begin(row_request) for row_request in row_requests]
    while desk.engine._batches["m"].waiting:
        desk.step()
    waiting, scored = desk.begin(row_requests[1]), desk.begin(row_requests[1], prompt_logprobs=True)
    desk.unload("one")
    assert set(desk.failed) == {decoding[1], waiting, scored}
    desk.finish()
    for number in (0, 2):
        folder = [None, None, case.two][number]
        reference = Reference(case.path, folder).answer(row_requests[number].prompt)
        assert_same(desk.answers[decoding[number]], reference)


def test_loading_again_changes_nothing(case: Case) -> None:
    desk = Desk(case.path)
    first = desk.load("one", case.one)
    assert isinstance(first, AdapterLoaded)
    assert first.nbytes == sum(array.nbytes for array in contents(case.one)[1].values())
    assert desk.load("one", case.path / "gone") == first


def test_a_model_that_is_not_loaded_takes_no_adapter(case: Case) -> None:
    desk = Desk(case.path)
    (failed,) = desk.engine.handle(LoadAdapter("other", "one", str(case.one)))
    assert isinstance(failed, AdapterFailed)
    assert "other is not loaded" in failed.message
    assert desk.engine.handle(UnloadAdapter("other", "one")) == [AdapterUnloaded("other", "one")]


@pytest.mark.tables
def test_after_the_last_adapter_the_layers_and_the_memory_are_as_before(each: Case) -> None:
    desk = Desk(each.path)
    (before,) = desk.together([RowRequest(a_prompt(300))])
    parameters = {name: id(array) for name, array in tree_flatten(desk.model.parameters())}
    types = {name: type(module) for name, module in desk.model.named_modules()}
    mx.clear_cache()
    memory = mx.get_active_memory()
    desk.loaded(one=each.one, two=each.two)
    assert mx.get_active_memory() > memory
    desk.together(mixed())
    desk.unload("two")
    assert desk.together([RowRequest(a_prompt(300))]) == [before]
    desk.unload("one")
    assert {name: type(module) for name, module in desk.model.named_modules()} == types
    assert not any(hasattr(m, "slots") or hasattr(m, "head") for m in desk.model.modules())
    kept = {name: id(array) for name, array in tree_flatten(desk.model.parameters())}
    assert kept == parameters
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() <= memory + 4096
    assert desk.together([RowRequest(a_prompt(300))]) == [before]


Q = "model.layers.0.self_attn.q_proj"
Spoil = Callable[[dict[str, Any], dict[str, mx.array]], Any]


def changed(name: str, change: Callable[[mx.array], mx.array]) -> Spoil:
    def spoil(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        tensors[name] = change(tensors[name])

    return spoil


def poisoned(value: float) -> Spoil:
    return changed(f"{Q}.lora_b", lambda b: mx.where(mx.arange(b.shape[1]) == 3, value, b))


def ranked(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    tensors[f"{Q}.lora_a"] = mx.zeros((64, 10_000))
    tensors[f"{Q}.lora_b"] = mx.zeros((10_000, 128))


def renamed(to: str) -> Spoil:
    def spoil(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        for leaf in ("lora_a", "lora_b"):
            tensors[f"{to}.{leaf}"] = tensors.pop(f"{Q}.{leaf}")

    return spoil


def doubled(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    for leaf in ("lora_a", "lora_b"):
        tensors[f"{Q}.{leaf}".removeprefix("model.")] = tensors[f"{Q}.{leaf}"]


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "one layer twice": (doubled, "are the same layer"),
    "no such layer": (renamed("model.layers.9.self_attn.q_proj"), "model.layers.9"),
    "a norm": (renamed("model.norm"), "model.norm"),
    "a block": (renamed("model.layers.0"), "model.layers.0: a TransformerBlock"),
    "wrong width": (changed(f"{Q}.lora_a", lambda a: a[:-1]), Q),
    "wrong height": (changed(f"{Q}.lora_b", lambda b: b[:, :-1]), Q),
    "other ranks": (changed(f"{Q}.lora_a", lambda a: a[:, :-1]), Q),
    "three dimensions": (changed(f"{Q}.lora_a", lambda a: a[None]), Q),
    "integers": (changed(f"{Q}.lora_a", lambda a: a.astype(mx.int32)), Q),
    "not a number": (poisoned(float("nan")), f"{Q}: some values are not finite"),
    "infinite": (poisoned(float("inf")), f"{Q}: some values are not finite"),
    "rank": (ranked, "rank is 10000"),
    "half a pair": (lambda c, t: t.pop(f"{Q}.lora_b"), f"{Q}: lora_b is missing"),
    "other tensors": (lambda c, t: t.update(x=mx.zeros(3)), "x: not a LoRA tensor"),
    "a magnitude": (lambda c, t: t.update({f"{Q}.m": mx.zeros(128)}), f"{Q}: m is not LoRA"),
    "no magnitude": (lambda c, t: c.update(fine_tune_type="dora"), "m is missing"),
    "nothing": (lambda c, t: t.clear(), "holds no tensor"),
    "full": (lambda c, t: c.update(fine_tune_type="full"), "serve it as a model"),
    "unknown": (lambda c, t: c.update(fine_tune_type="loha"), "loha"),
    "scale": (lambda c, t: c["lora_parameters"].update(scale=float("nan")), "scale is nan"),
    "no scale": (lambda c, t: c["lora_parameters"].pop("scale"), "scale is None"),
    "no parameters": (lambda c, t: c.pop("lora_parameters"), "scale is None"),
    "huge scale": (lambda c, t: c["lora_parameters"].update(scale=1e300), "not finite"),
    "not lora": (lambda c, t: c.update(peft_type="IA3"), "IA3"),
}


@pytest.mark.tables
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_with_an_adapter_is_said_and_changes_nothing(
    tiny_path: Path, tmp_path: Path, name: str
) -> None:
    spoil, said = HOSTILE[name]
    config, tensors = contents(mlx_adapter(tmp_path / "good", tiny_path))
    spoil(config, tensors)
    assert_refused(tiny_path, save(tmp_path / "bad", config, tensors), said)


PEFT_HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({"bias": "all"}, "bias 'all'"),
    "rank": ({"r": 5}, "rank 4"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha is None"),
    "expression": ({"rank_pattern": {"(a+)+b": 4}}, "(a+)+b"),
    "pattern": ({"rank_pattern": [4]}, "rank_pattern is not an object"),
    "experts": ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
    "dora": ({"use_dora": True}, "lora_magnitude_vector is missing"),
}


@pytest.mark.parametrize("name", PEFT_HOSTILE)
def test_what_is_wrong_with_a_peft_adapter_is_said(
    tiny_path: Path, tmp_path: Path, name: str
) -> None:
    fields, said = PEFT_HOSTILE[name]
    good = mlx_adapter(tmp_path / "good", tiny_path)
    assert_refused(tiny_path, peft_adapter(tmp_path / "bad", good, **fields), said)


FILES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda f: weights_of(f).write_bytes(weights_of(f).read_bytes()[:-100]),
    "cut header": lambda f: weights_of(f).write_bytes(weights_of(f).read_bytes()[:100]),
    "huge header": lambda f: weights_of(f).write_bytes(b"\xff" * 8 + b"{}"),
    "pickle": lambda f: weights_of(f).write_bytes(b"\x80\x04N."),
    "no weights": lambda f: weights_of(f).unlink(),
    "no config": lambda f: (f / "adapter_config.json").unlink(),
    "not json": lambda f: (f / "adapter_config.json").write_text("{"),
    "no object": lambda f: (f / "adapter_config.json").write_text("[]"),
    "deep": lambda f: (f / "adapter_config.json").write_text("[" * 100_000),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_can_not_be_read_are_refused(tiny_path: Path, tmp_path: Path, name: str) -> None:
    folder = mlx_adapter(tmp_path / "bad", tiny_path)
    FILES[name](folder)
    assert_refused(tiny_path, folder, "adapter")


def assert_refused(path: Path, folder: Path, said: str) -> None:
    desk = Desk(path)
    row = desk.begin(RowRequest(a_prompt(9)))
    desk.step()
    types = {name: type(module) for name, module in desk.model.named_modules()}
    failed = desk.load("bad", folder)
    assert isinstance(failed, AdapterFailed)
    assert said in failed.message
    assert {name: type(module) for name, module in desk.model.named_modules()} == types
    desk.finish()
    assert_same(desk.answers[row], Reference(path, None).answer(a_prompt(9)))


def test_rows_go_on_while_adapters_come_and_go(case: Case) -> None:
    desk = Desk(case.path).loaded(one=case.one)
    row_requests = [
        RowRequest(a_prompt(9, seed=n), adapter) for n, adapter in enumerate([None, "one"])
    ]
    rows = [desk.begin(row_request, 40) for row_request in row_requests]
    for _ in range(4):
        desk.step()
        desk.loaded(two=case.two)
        desk.begin(RowRequest(a_prompt(5), "two"), 3)
        for _ in range(8):
            desk.step()
        desk.unload("two")
    desk.finish()
    for row_request, row in zip(row_requests, rows, strict=True):
        folder = case.one if row_request.adapter else None
        assert_same(desk.answers[row], Reference(case.path, folder).answer(row_request.prompt, 40))
