"""The engine in the test's own process: commands in, steps, reports out."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_parts.simulated.virtual import GREEDY, Network

from mlx_server.engine.messages import (
    CancelRows,
    Command,
    CommandFailed,
    DeviceFailed,
    Generate,
    LimitCache,
    LoadAdapter,
    LoadModel,
    ModelLoaded,
    ModelLoading,
    PreemptRows,
    Prefilled,
    Report,
    StepOutput,
    Unloaded,
    UnloadModel,
)
from mlx_server.requests import Tier
from mlx_server.worker import engine, weights
from mlx_server.worker.batch import Batch, StepResult
from mlx_server.worker.engine import Engine
from mlx_server.worker.lora_adapters import AdapterWeights
from mlx_server.worker.prefill.memory_tier import MemoryTier
from mlx_server.worker.prefill_groups import PrefillGroup, PrefillGroups
from mlx_server.worker.prompt_store import RowPrompts
from mlx_server.worker.rows import PIECE, Rows
from mlx_server.worker.sampling import Sampler
from tests.clocks import Clock
from tests.worker.batch_runs import ids
from tests.worker.engine_runs import (
    active_memory,
    ask,
    drain,
    failures,
    load,
    of,
    run,
    tokens,
    tokens_of,
    until,
)


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def reconfigured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shutil.rmtree, "config.json"),
        (truncated, "exceeding the size of the file"),
        (reconfigured(model_type="nonesuch"), "nonesuch"),
        (reconfigured(num_attention_heads=3), "shape"),
        # found only when the network is first called
        (reconfigured(rope_theta="1e4"), "rope"),
    ],
    ids=["missing", "truncated", "unknown", "shapes", "unusable"],
)
def test_a_load_that_fails_is_reported_and_the_engine_goes_on(
    tiny_path: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_path, folder)
    damage(folder)
    engine = Engine()
    engine.handle(LoadModel("damaged", str(folder)))
    (failed,) = of(CommandFailed, drain(engine))
    assert failed.model == "damaged"
    assert reason in failed.message

    assert 0 in failures(run(engine, ask(0, model="damaged")))
    assert of(ModelLoaded, load(engine, tiny_path))
    assert len(tokens_of(1, run(engine, ask(1)))) == 5


def test_a_step_that_fails_takes_its_batch_and_no_other(
    engine: Engine, tiny_path: Path, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(engine, tiny_path, "second")
    engine.handle(ask(0, tokens=1000))
    engine.handle(ask(1, prompt=3000))  # in prefill
    engine.handle(ask(2, model="second"))
    before = until(engine, lambda reports: {0, 2} <= {t.row for t in tokens(reports)})

    unlucky, step = engine.models.batches["tiny"], Batch.step

    def fails(self: Batch, tier: Tier | None = None) -> StepResult:
        if self is unlucky:
            raise MemoryError("no room")
        return step(self, tier)

    monkeypatch.setattr(Batch, "step", fails)
    after = until(engine, lambda reports: bool(failures(reports)))
    assert "no room" in failures(after)[0]
    after += drain(engine)
    assert set(failures(after)) == {0, 1}
    assert ids(tokens_of(2, before + after)) == answer

    served = run(engine, ask(3))
    assert ids(tokens_of(3, served)) == answer
    assert tokens_of(0, served) == tokens_of(1, served) == []


FAILING = {
    "before the model is called": (PrefillGroups, "_known"),
    "in a prompt": (PrefillGroup, "compute"),
    "when a row has ended": (RowPrompts, "store"),
}


@pytest.mark.parametrize("place", FAILING)
def test_wherever_a_step_fails_every_row_hears_of_it(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Also rows that were taken up, or came to their end, in that very step."""
    engine.handle(ask(0, tokens=4))
    engine.handle(ask(1, tokens=1000))
    before = until(engine, lambda reports: len(tokens_of(0, reports)) == 3)
    for row in range(2, 7):
        engine.handle(ask(row, prompt=40))

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(*FAILING[place], fails)
        after = until(engine, lambda reports: bool(failures(reports)))
    assert not any(token.finish for token in tokens(before))
    ended = {token.row for token in tokens(after) if token.finish}
    assert set(failures(after)) | ended == set(range(7))
    assert of(StepOutput, after)[-1].waiting == 0
    assert engine.pause is None
    assert ids(tokens_of(9, run(engine, ask(9)))) == answer


def test_unloading_gives_the_memory_back(tiny_path: Path) -> None:
    engine = Engine(cache_bytes=1 << 30)
    before = active_memory()
    load(engine, tiny_path)
    loaded = active_memory()
    assert loaded - before > 400_000
    reports = run(engine, *(ask(row, prompt=300 + row) for row in range(4)))
    engine.handle(ask(4, prompt=70, tokens=1000))
    reports = until(engine, lambda reports: len(tokens_of(4, reports)) > 3)
    stepped = of(StepOutput, reports)[-1]
    assert stepped.cache_bytes > 4 * 300 * 512
    assert stepped.active_bytes > loaded + stepped.cache_bytes
    (last,) = of(StepOutput, engine.handle(UnloadModel("tiny")))
    assert last.cache_bytes == 0
    assert active_memory() - before < 10_000


def test_unloading_fails_the_rows_that_are_left_and_no_others(
    engine: Engine, tiny_path: Path, answer: list[int]
) -> None:
    load(engine, tiny_path, "second")
    engine.handle(ask(9))
    for row in range(6):  # four decode, two wait
        engine.handle(ask(row, tokens=1000, model="second"))
    engine.handle(ask(6, prompt=3 * PIECE, model="second", prompt_logprobs=True))
    before = until(engine, lambda reports: {0, 9} <= {t.row for t in tokens(reports)})
    reports = engine.handle(UnloadModel("second"))
    assert set(failures(reports)) == set(range(7))
    assert of(StepOutput, reports)[-1].waiting == 0
    assert reports[-1] == Unloaded("second")
    assert ids(tokens_of(9, before + drain(engine))) == answer

    assert "second" in failures(run(engine, ask(10, model="second")))[10]
    assert of(ModelLoaded, load(engine, tiny_path, "second"))
    assert ids(tokens_of(11, run(engine, ask(11, model="second")))) == answer


def test_a_model_is_unloaded_while_it_loads(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MOST_BYTES", 50_000)
    engine = Engine()
    before = active_memory()
    engine.handle(LoadModel("tiny", str(tiny_path)))
    assert of(ModelLoading, engine.step() + engine.step())
    reports = engine.handle(UnloadModel("tiny"))
    assert [failed.model for failed in of(CommandFailed, reports)] == ["tiny"]
    assert reports[-1] == Unloaded("tiny")
    assert engine.pause is None
    assert active_memory() - before < 10_000


def test_the_prompt_cache_gives_way_when_told_to(tiny_path: Path) -> None:
    engine = Engine(cache_bytes=1 << 30)
    load(engine, tiny_path)
    full = of(StepOutput, run(engine, *(ask(row, prompt=60 + row) for row in range(4))))[-1]
    again = run(engine, ask(4, prompt=63))
    assert of(Prefilled, again) == [Prefilled(4, 62)]

    half = full.cache_bytes // 2
    assert engine.handle(LimitCache(half)) == []
    left = of(StepOutput, run(engine, ask(5, prompt=5)))[-1].cache_bytes
    assert half // 2 < left <= half
    engine.handle(LimitCache(0))
    assert of(Prefilled, run(engine, ask(6, prompt=63))) == [Prefilled(6, 0)]
    engine.handle(LimitCache(0))  # what a row handed over that had ended alone
    engine.handle(LimitCache(1 << 30))
    assert of(Prefilled, run(engine, ask(7, prompt=63))) == [Prefilled(7, 0)]
    assert of(Prefilled, run(engine, ask(8, prompt=63))) == [Prefilled(8, 62)]


def test_a_conversation_that_ends_alone_needs_no_room_next_to_it(tiny_path: Path) -> None:
    engine = Engine(cache_bytes=1 << 30)
    load(engine, tiny_path)
    engine.handle(LimitCache(0))
    assert of(StepOutput, run(engine, ask(0, prompt=60)))[-1].cache_bytes > 0
    (known,) = of(Prefilled, run(engine, ask(1, prompt=60)))
    assert known.cached_tokens >= 58


PAIR = "m4-max:gpt-oss-20b"
MODELS = "abcd"
STREAM = 0
LONGEST_GAP = 0.4


@dataclass
class Models:
    """An engine with several models; model "a" streams."""

    count: int
    clock: Clock = field(default_factory=Clock)
    times: dict[int, list[float]] = field(default_factory=dict)
    """When each row had a token."""

    def __post_init__(self) -> None:
        self.engine = Engine(clock=self.clock)
        for model in MODELS[: self.count]:
            network = Network(PAIR, self.clock.advance)
            self.engine.models.add(model, network)
        for row, model in enumerate(MODELS[: self.count], 100):
            self.ask(row, model, 300, 3)
            self.run_until(row, 3)
        self.ask(STREAM, "a", 300, 1_000_000)
        self.run_until(STREAM, 60)

    def ask(self, row: int, model: str, prompt: int, tokens: int) -> None:
        self.times[row] = []
        ids = [row % 200 + 1, *[7] * (prompt - 1)]
        self.engine.handle(Generate(row, model, ids, tokens, [], GREEDY, client=str(row)))

    def run_until(self, row: int, tokens: int) -> None:
        while len(self.times[row]) < tokens:
            for report in self.engine.step():
                if isinstance(report, StepOutput):
                    for token in report.tokens:
                        self.times[token.row].append(self.clock.now)

    def gap(self, since: float) -> float:
        """The longest of the stream."""
        times = self.times[STREAM]
        return max(b - a for a, b in pairwise(times) if b > since)


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "tokens"), [(10_000, 1), (300, 300)])
@pytest.mark.parametrize("own_prompt", [False, True])
@pytest.mark.parametrize("others", [1, 3])
def test_a_stream_waits_for_one_piece_however_many_models_work(
    others: int, own_prompt: bool, prompt: int, tokens: int
) -> None:
    models = Models(1 + others)
    began = models.clock.now
    if own_prompt:
        models.ask(50, "a", 30_000, 8)
    for row, model in enumerate(MODELS[1 : 1 + others], 1):
        models.ask(row, model, prompt, tokens)
    for row in range(1, 1 + others):
        models.run_until(row, tokens)
    assert models.gap(began) <= LONGEST_GAP


# Errors of the GPU: what they fail, and when they end the process.


NO_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)
IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)


def struck(engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """The next step of any model fails as a GPU does."""

    def fails(batch: Batch, tier: Tier | None = None) -> StepResult:
        raise RuntimeError(text)

    with monkeypatch.context() as patched:
        patched.setattr(Batch, "step", fails)
        return engine.step()


@pytest.fixture
def two(tiny_path: Path) -> Engine:
    """Two models that answer a row each, and a prompt in the cache."""
    engine = Engine(concurrency=4, cache_bytes=1 << 30)
    load(engine, tiny_path)
    load(engine, tiny_path, "second")
    run(engine, ask(9, prompt=60))
    assert engine.prompts.memory.nbytes
    engine.handle(ask(0, tokens=1000))
    engine.handle(ask(1, tokens=1000, model="second"))
    until(engine, lambda reports: {0, 1} <= {t.row for t in tokens(reports)})
    return engine


def test_a_gpu_error_fails_all_that_it_may_have_spoiled(
    two: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised late, in whichever model waits for the GPU next."""
    reports = struck(two, NO_MEMORY, monkeypatch)
    (failed,) = of(DeviceFailed, reports)
    assert (failed.kind, failed.ends, two.broken) == ("out_of_memory", False, False)
    assert set(failures(reports)) == {0, 1}
    assert all("memory ran out" in message for message in failures(reports).values())
    assert two.prompts.memory.nbytes == of(StepOutput, reports)[-1].cache_bytes == 0
    again = run(two, ask(2, prompt=60), ask(3, model="second"), ask(4))
    assert Prefilled(2, 0) in of(Prefilled, again)  # whichever model comes first
    assert ids(tokens_of(3, again)) == ids(tokens_of(4, again)) == answer


def test_the_second_gpu_error_in_a_row_ends_the_process(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck(two, NO_MEMORY, monkeypatch)
    two.handle(ask(5, tokens=1000))
    (failed,) = of(DeviceFailed, struck(two, NO_MEMORY, monkeypatch))
    assert failed.ends
    assert two.broken


def test_after_ignored_submissions_only_another_process_helps(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (failed,) = of(DeviceFailed, struck(two, IGNORED, monkeypatch))
    assert (failed.kind, failed.ends, two.broken) == ("lost", True, True)


@pytest.mark.parametrize("text", [NO_MEMORY, "any other error"])
def test_a_row_whose_prefill_was_just_beginning_fails_too(
    text: str, two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It no longer waits, and is not computed yet."""

    def fails(*_: object) -> Any:
        raise RuntimeError(text)

    two.handle(ask(5))
    monkeypatch.setattr(PrefillGroups, "make", fails)
    reports = until(two, lambda seen: 5 in failures(seen))
    assert 0 in failures(reports)


def test_a_gpu_error_in_a_scoring_or_a_load_is_one_too(
    two: Engine, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError(NO_MEMORY)

    with monkeypatch.context() as patched:
        patched.setattr(Rows, "compute_piece", fails)
        two.handle(ask(6, prompt=3 * PIECE, prompt_logprobs=True))
        reports = two.step()
    assert of(DeviceFailed, reports)
    assert set(failures(reports)) == {0, 1, 6}
    with monkeypatch.context() as patched:
        patched.setattr(engine.Engine, "_load_piece", fails)
        two.handle(LoadModel("third", str(tiny_path)))
        reports = two.step()
    assert of(DeviceFailed, reports)
    assert of(CommandFailed, reports)


FAILS_IN: dict[str, tuple[Any, str, Command]] = {
    "cancel": (Batch, "cancel", CancelRows([0])),
    "preempt": (Batch, "preempt", PreemptRows([0])),
    "unload": (MemoryTier, "forget", UnloadModel("second")),
    "adapter": (AdapterWeights, "load", LoadAdapter("tiny", "a", "nowhere")),
}


@pytest.mark.parametrize("name", FAILS_IN)
def test_a_gpu_error_in_a_command_is_one_too(
    two: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is carried out all the same, with another try."""
    owner, method, command = FAILS_IN[name]
    works, tries = getattr(owner, method), []

    def fails_once(*arguments: Any) -> Any:
        tries.append(arguments)
        if len(tries) == 1:
            raise RuntimeError(NO_MEMORY)
        return works(*arguments)

    monkeypatch.setattr(owner, method, fails_once)
    reports = two.handle(command)
    (failed,) = of(DeviceFailed, reports)
    assert (failed.kind, failed.ends, two.broken) == ("out_of_memory", False, False)
    assert set(failures(reports)) == {0, 1}
    assert of(StepOutput, reports)[-1].waiting == 0
    if name == "unload":
        assert of(Unloaded, reports) == [Unloaded("second")]
    if name == "adapter":
        assert "adapter_config.json" in of(CommandFailed, reports)[0].message
    assert tokens_of(7, run(two, ask(7)))


def test_a_gpu_error_in_both_tries_of_a_command_ends_the_process(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError(NO_MEMORY)

    monkeypatch.setattr(AdapterWeights, "load", fails)
    reports = two.handle(LoadAdapter("tiny", "a", "nowhere"))
    assert [failed.ends for failed in of(DeviceFailed, reports)] == [False, True]
    assert not of(CommandFailed, reports), "its files are not at fault"
    assert two.broken


@pytest.mark.slow
def test_a_gpu_error_while_rows_are_sampled_is_not_taken_for_a_rows_own(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError(IGNORED)

    monkeypatch.setattr(Sampler, "__call__", fails)
    assert of(DeviceFailed, two.step())
