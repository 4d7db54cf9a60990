"""Rows of many adapters in one batch: each answers as mlx-lm does with its adapter alone."""

import gc
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlx_server.engine.messages import CancelRows, Generate, RowFailed
from mlx_server.models.adapter_catalog import read_base_shapes
from mlx_server.models.adapter_reader import read_adapter
from mlx_server.worker.rows import prompt_logprobs
from tests.worker.batch_runs import Ask, a_prompt, alone
from tests.worker.engine_runs import scored_of
from tests.worker.kinds import CONFIGS, KINDS, LLAMA, Kind
from tests.worker.lora.desk import (
    GREEDY,
    SEEN,
    TOKENS,
    Case,
    Desk,
    Reference,
    RowRequest,
    a_case,
    assert_same,
    mixed,
)
from tests.worker.lora_files import (
    contents,
    mlx_adapter,
    network,
    peft_adapter,
    save,
    weakened,
)

TIED = Kind("llama-tied", {**LLAMA, "tie_word_embeddings": True})
TIED_4BIT = replace(TIED, name="llama-tied-4bit", quantized={"group_size": 32, "bits": 4})
GPT_OSS_4BIT = Kind("gpt-oss-4bit", CONFIGS["gpt_oss"], {"group_size": 32, "bits": 4})
OTHERS = ("llama", "gpt_oss", "mamba2", "lfm2")
EVERY_KIND = (*map(KINDS.__getitem__, OTHERS), GPT_OSS_4BIT, TIED, TIED_4BIT)


@pytest.fixture(scope="module", params=EVERY_KIND, ids=lambda kind: kind.name)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind.name)
    return a_case(kind.save(folder / "base"), folder)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("tied")
    return a_case(TIED.save(folder / "base"), folder)


@pytest.mark.slow
def test_each_row_answers_as_its_adapter_alone(each: Case) -> None:
    """Prompts short and long: experts sort the tokens of the long ones."""
    references = each.references
    row_requests = mixed()
    for row_request, use in zip(list(row_requests), [*references] * 2, strict=True):
        row_requests.append(replace(row_request, adapter=use[0], scale=use[1]))
    desk = Desk(each.path).loaded(one=each.one, two=each.two)
    answers = desk.all_of(row_requests)
    for row_request, answer in zip(row_requests, answers, strict=True):
        reference = references[row_request.adapter, row_request.scale]
        reference.assert_is(row_request.prompt, answer)


def test_a_scale_of_nothing_is_the_base(case: Case) -> None:
    desk = Desk(case.path, 1 << 20).loaded(one=case.one)
    prompt = a_prompt(40)
    (base,), (nothing,) = (
        desk.all_of([RowRequest(prompt)]),
        desk.all_of([RowRequest(prompt, "one", 0.0)]),
    )
    assert nothing == base
    assert desk.cached == {1: 0, 2: 39}


@pytest.mark.parametrize("part", ["embedding", "head"])
def test_an_embedding_and_a_head_with_the_same_weights_are_adapted_apart_by_peft(
    case: Case, tmp_path: Path, part: str
) -> None:
    ours = mlx_adapter(tmp_path / "mlx", case.path, keys=["model.embed_tokens"])
    config, tensors = contents(ours)
    a, b = (tensors[f"model.embed_tokens.lora_{each}"] for each in "ab")
    peft = peft_adapter(tmp_path / "peft", ours)
    if part == "head":
        settings = json.loads((peft / "adapter_config.json").read_text())
        pair = {f"base_model.model.lm_head.lora_{k}.weight": v for k, v in (("A", b), ("B", a))}
        peft = save(tmp_path / "head", settings, pair, peft=True)
    shapes = read_base_shapes(case.path, "base")
    assert read_adapter(peft, base_shapes=shapes.shapes, complete=shapes.complete)
    desk = Desk(case.path).loaded(peft=peft, ours=ours)
    (theirs, mlx) = desk.all_of([RowRequest(a_prompt(9), "peft"), RowRequest(a_prompt(9), "ours")])
    # one is the sum with what was learnt, and the other as it was
    model = network(case.path)
    weight = model.model.embed_tokens.weight
    learnt = weight + config["lora_parameters"]["scale"] * (a @ b)
    model.lm_head = type(model.model.layers[0].self_attn.q_proj)(64, 320, bias=False)
    model.lm_head.weight = learnt if part == "head" else weight
    model.model.embed_tokens.weight = learnt if part == "embedding" else weight
    model.args.tie_word_embeddings = False
    assert_same(theirs, alone(model, Ask(a_prompt(9), TOKENS, sampling=SEEN)))
    assert_same(mlx, Reference(case.path, ours).answer(a_prompt(9)))
    desk.unload("peft")
    desk.unload("ours")
    assert desk.all_of([RowRequest(a_prompt(9))])[0] != theirs


@pytest.mark.parametrize("quantized", [None, {"group_size": 32, "bits": 4}], ids=["f32", "4bit"])
def test_dora_rows_among_others(tmp_path: Path, quantized: dict[str, Any] | None) -> None:
    biased = {**LLAMA, "attention_bias": True, "mlp_bias": True}
    path = Kind("llama", biased, quantized).save(tmp_path / "base")
    dora = mlx_adapter(tmp_path / "dora", path, seed=5, dora=True)
    lora = mlx_adapter(tmp_path / "lora", path, seed=6)
    desk = Desk(path).loaded(dora=dora, lora=lora)
    references = {
        name: Reference(path, folder)
        for name, folder in {None: None, "dora": dora, "lora": lora}.items()
    }
    row_requests = [
        RowRequest(a_prompt(30, seed=n), adapter) for n in range(2) for adapter in references
    ]
    only = [RowRequest(a_prompt(30), "dora"), RowRequest(a_prompt(31), "dora")]
    for batch in (row_requests, only):
        for row_request, answer in zip(batch, desk.all_of(batch), strict=True):
            references[row_request.adapter].assert_is(row_request.prompt, answer)


@pytest.mark.slow
@settings(max_examples=3, suppress_health_check=[*HealthCheck])
@given(seed=st.integers(0, 1 << 30))
def test_rows_come_and_go(coming: "Coming", seed: int) -> None:
    """They join, finish and are cancelled at any step; prompts begin alike and are repeated."""
    dice = random.Random(seed)
    desk = Desk(coming.path, 1 << 26).loaded(**coming.folders)
    asked: dict[int, tuple[RowRequest, int]] = {}
    cancelled = set()
    for _ in range(60):
        if dice.random() < 0.3:
            row_request, tokens = coming.row_request(dice), dice.randrange(1, 12)
            asked[desk.ask(row_request, tokens)] = row_request, tokens
        if asked and dice.random() < 0.05:
            row = dice.choice(list(asked))
            cancelled.add(row)
            desk.handle(CancelRows([row]))
        desk.step()
    desk.finish()
    assert not desk.failed
    for row, (row_request, tokens) in asked.items():
        answer = desk.answers[row]
        assert row in cancelled or len(answer) == tokens
        reference = coming.references[row_request.adapter, row_request.scale]
        reference.assert_begins(row_request.prompt, answer)


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
        self.references: dict[tuple[str | None, float], Reference] = {
            (None, 1.0): Reference(path, None),
            **{(name, 1.0): Reference(path, self.folders[name]) for name in names},
            **{(name, 0.5): Reference(path, halves[name]) for name in names},
        }
        self._prompts = [
            [*a_prompt(20), *a_prompt(n, seed=s)] for n in (1, 20, 60) for s in range(2)
        ]

    def row_request(self, dice: random.Random) -> RowRequest:
        return RowRequest(dice.choice(self._prompts), *dice.choice(list(self.references)))


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def coming(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Coming:
    folder = tmp_path_factory.mktemp(request.param)
    return Coming(KINDS[request.param].save(folder / "base"), folder)


def test_a_prompt_is_known_only_to_what_computed_it(case: Case) -> None:
    references = case.references
    prompt = a_prompt(60)
    desk = Desk(case.path, 1 << 26).loaded(one=case.one, two=case.two)
    row_requests = [RowRequest(prompt, *use) for use in references]
    for row_request in row_requests * 2:  # one after the other
        (answer,) = desk.all_of([row_request])
        assert_same(answer, references[row_request.adapter, row_request.scale].answer(prompt))
    assert list(desk.cached.values()) == [0] * 4 + [59] * 4


def test_a_prompt_is_scored_by_its_adapter(case: Case) -> None:
    prompt = a_prompt(150)
    desk = Desk(case.path).loaded(one=case.one, two=case.two)
    for (adapter, scale), reference in case.references.items():
        row_request = RowRequest(prompt, adapter, scale)
        row = desk.ask(row_request, prompt_logprobs=True)
        desk.finish()
        scored = [entry.chosen for entry in scored_of(row, desk.reports)]
        pieces = prompt_logprobs(reference.model, prompt, 0)
        exact = [entry.chosen for piece in pieces for entry in piece]
        assert scored == pytest.approx(exact, abs=1e-3)
        assert_same(desk.answers[row], reference.answer(prompt))


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
    row = desk.ask(RowRequest(a_prompt(9), "one"))
    desk.step()
    asked = Generate(99, "m", a_prompt(9), 5, [], GREEDY, **fields)  # type: ignore[arg-type]
    (failed,) = desk.handle(asked)
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
    decoding = [desk.ask(row_request) for row_request in row_requests]
    while desk.batch.waiting:
        desk.step()
    waiting, scored = desk.ask(row_requests[1]), desk.ask(row_requests[1], prompt_logprobs=True)
    desk.unload("one")
    assert set(desk.failed) == {decoding[1], waiting, scored}
    desk.finish()
    for number in (0, 2):
        folder = [None, None, case.two][number]
        reference = Reference(case.path, folder).answer(row_requests[number].prompt)
        assert_same(desk.answers[decoding[number]], reference)


@pytest.mark.slow
def test_after_the_last_adapter_the_layers_and_the_memory_are_as_before(each: Case) -> None:
    desk = Desk(each.path)
    (before,) = desk.all_of([RowRequest(a_prompt(300))])
    parameters = {name: id(array) for name, array in tree_flatten(desk.model.parameters())}
    types = {name: type(module) for name, module in desk.model.named_modules()}
    gc.collect()  # engines of other tests
    mx.clear_cache()
    memory = mx.get_active_memory()
    desk.loaded(one=each.one, two=each.two)
    assert mx.get_active_memory() > memory
    desk.all_of(mixed())
    desk.unload("two")
    assert desk.all_of([RowRequest(a_prompt(300))]) == [before]
    desk.unload("one")
    assert {name: type(module) for name, module in desk.model.named_modules()} == types
    assert not any(hasattr(m, "slots") or hasattr(m, "head") for m in desk.model.modules())
    kept = {name: id(array) for name, array in tree_flatten(desk.model.parameters())}
    assert kept == parameters
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() <= memory + 4096
    assert desk.all_of([RowRequest(a_prompt(300))]) == [before]


def test_rows_go_on_while_adapters_come_and_go(case: Case) -> None:
    desk = Desk(case.path).loaded(one=case.one)
    row_requests = [
        RowRequest(a_prompt(9, seed=n), adapter) for n, adapter in enumerate([None, "one"])
    ]
    rows = [desk.ask(row_request, 40) for row_request in row_requests]
    for _ in range(4):
        desk.step()
        desk.loaded(two=case.two)
        desk.ask(RowRequest(a_prompt(5), "two"), 3)
        for _ in range(8):
            desk.step()
        desk.unload("two")
    desk.finish()
    for row_request, row in zip(row_requests, rows, strict=True):
        folder = case.one if row_request.adapter else None
        assert_same(desk.answers[row], Reference(case.path, folder).answer(row_request.prompt, 40))
