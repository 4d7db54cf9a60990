"""The engine in the test's own process: commands in, steps, reports out."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.messages import (
    AdapterFailed,
    Admitted,
    CancelRows,
    Command,
    DeviceFailed,
    Generate,
    LimitCache,
    LoadAdapter,
    LoadModel,
    ModelLoaded,
    ModelLoadFailed,
    ModelLoading,
    ModelUnloaded,
    PreemptRows,
    Prefilled,
    PromptLogprobs,
    Report,
    StepOutput,
    UnloadModel,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker import read_rate, row_admission, worker
from mlx_server.worker.batch import Batch
from mlx_server.worker.lora.adapters import AdapterWeights
from mlx_server.worker.phases import PrefillBatch
from mlx_server.worker.prefill.prompt_cache import PromptCache
from mlx_server.worker.prefill_groups import PrefillGroups
from mlx_server.worker.prompt_logprobs import PIECE, Scoring
from mlx_server.worker.row_admission import RowAdmission
from mlx_server.worker.row_cache import RowCache
from mlx_server.worker.sampling import Sampler
from mlx_server.worker.step_result import StepResult
from mlx_server.worker.worker import Engine
from tests.worker.batch_runs import ids
from tests.worker.engine_runs import (
    GREEDY,
    Clock,
    active_memory,
    ask,
    drain,
    failures,
    load,
    of,
    run,
    run_by,
    tokens,
    tokens_of,
    until,
)


@pytest.fixture
def answer(tiny_path: Path) -> list[int]:
    """To `ask` as it stands, from an engine that did nothing else."""
    engine = Engine()
    load(engine, tiny_path)
    return ids(tokens_of(0, run(engine, ask(0))))


def test_a_load_reports_its_bytes_and_then_the_model(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_rate, "MOST_BYTES", 50_000)
    engine = Engine()
    assert engine.pause is None
    *progress, loaded = load(engine, tiny_path)
    done = [report.done for report in of(ModelLoading, progress)]
    assert len(done) == len(progress) > 4
    assert done == sorted(set(done))
    assert {report.total for report in of(ModelLoading, progress)} == {done[-1]}
    size = (tiny_path / "model.safetensors").stat().st_size
    assert 0.9 * size < done[-1] < size  # the rest of the file is its header
    assert isinstance(loaded, ModelLoaded)
    assert (loaded.model, loaded.vocabulary) == ("tiny", 320)
    assert loaded.nbytes >= done[-1]
    assert engine.pause is None


def test_other_models_decode_while_one_loads(
    engine: Engine, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_rate, "MOST_BYTES", 50_000)
    engine.handle(ask(0, tokens=1000))
    until(engine, lambda reports: bool(tokens_of(0, reports)))
    engine.handle(LoadModel("second", str(tiny_path)))
    reports = until(engine, lambda reports: bool(of(ModelLoaded, reports)))
    pieces = [at for at, report in enumerate(reports) if isinstance(report, ModelLoading)]
    assert len(pieces) > 4
    assert all(tokens_of(0, reports[one:next]) for one, next in pairwise(pieces))


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
    (failed,) = of(ModelLoadFailed, drain(engine))
    assert failed.model == "damaged"
    assert reason in failed.message

    assert 0 in failures(run(engine, ask(0, model="damaged")))
    assert of(ModelLoaded, load(engine, tiny_path))
    assert len(tokens_of(1, run(engine, ask(1)))) == 5


def test_tokens_end_with_a_finish_and_the_engine_rests(engine: Engine, answer: list[int]) -> None:
    reports = run(engine, ask(0), ask(1, prompt=9, tokens=2))
    assert reports[:4] == [Admitted(0), Admitted(1), Prefilled(0, 0), Prefilled(1, 0)]
    assert ids(tokens_of(0, reports)) == answer
    assert [token.finish for token in tokens_of(1, reports)] == [None, "length"]
    assert of(StepOutput, reports)[-1].waiting == 0
    assert engine.pause is None
    assert engine.step() == []


def test_a_row_for_a_model_that_is_not_loaded_fails(engine: Engine) -> None:
    reports = run(engine, ask(0, model="absent"), ask(1))
    assert "absent" in failures(reports)[0]
    assert of(Admitted, reports) == [Admitted(1)]
    assert len(tokens_of(1, reports)) == 5


BEYOND = 320


def named(command: Generate) -> str:
    """The name of a case."""
    unusual = {k: v for k, v in asdict(command.sampling).items() if v != getattr(GREEDY, k)}
    return f"{command.prompt[:2]} {command.max_tokens} {unusual or ''}"


@pytest.mark.parametrize("score", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ask(0, prompt=0),
        ask(0, tokens=-1),
        ask(0, sampling=SamplingParams(logit_bias={BEYOND: 1.0})),
        ask(0, sampling=SamplingParams(logit_bias={-1: 1.0})),
        Generate(0, "tiny", [5, BEYOND, 5], 5, [], GREEDY),
        Generate(0, "tiny", [5, -1], 5, [], GREEDY),
        Generate(0, "tiny", [5, BEYOND], 5, [], SamplingParams(presence_penalty=1.0)),
        ask(0, sampling=SamplingParams(temperature=math.nan)),
        ask(0, sampling=SamplingParams(temperature=math.inf)),
        ask(0, sampling=SamplingParams(temperature=-1.0)),
        ask(0, sampling=SamplingParams(top_k=-1)),
        ask(0, sampling=SamplingParams(top_p=0.0)),
        ask(0, sampling=SamplingParams(min_p=-0.1)),
        ask(0, sampling=SamplingParams(min_p=1.1)),
        ask(0, sampling=SamplingParams(repetition_penalty=0.0)),
        ask(0, sampling=SamplingParams(frequency_penalty=math.inf)),
        ask(0, sampling=SamplingParams(logit_bias={3: math.inf})),
        ask(0, sampling=SamplingParams(logprobs=-1)),
        ask(0, forced_tokens=[1, 2]),  # of a model that plays none
        ask(0, forced_tokens=[]),
        ask(0, delay=-1.0),
        ask(0, delay=math.nan),
        ask(0, delay=math.inf),
    ],
    ids=named,
)
def test_what_can_not_be_done_fails_alone(
    engine: Engine, answer: list[int], command: Generate, score: bool
) -> None:
    """MLX itself would read and write past the end of an array."""
    command.prompt_logprobs = score
    reports = run(engine, command, ask(1))
    assert list(failures(reports)) == [0]
    assert tokens_of(0, reports) == []
    assert of(PromptLogprobs, reports) == []
    assert ids(tokens_of(1, reports)) == answer


def test_a_row_of_no_tokens_that_is_not_scored_fails(engine: Engine) -> None:
    assert list(failures(run(engine, ask(0, tokens=0)))) == [0]


def test_a_step_that_fails_takes_its_batch_and_no_other(
    engine: Engine, tiny_path: Path, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(engine, tiny_path, "second")
    engine.handle(ask(0, tokens=1000))
    engine.handle(ask(1, prompt=3000))  # in prefill
    engine.handle(ask(2, model="second"))
    before = until(engine, lambda reports: {0, 2} <= {t.row for t in tokens(reports)})

    unlucky, step = engine._batches["tiny"], Batch.step

    def fails(self: Batch) -> StepResult:
        if self is unlucky:
            raise MemoryError("no room")
        return step(self)

    monkeypatch.setattr(Batch, "step", fails)
    after = until(engine, lambda reports: bool(failures(reports)))
    assert "no room" in failures(after)[0]
    after += drain(engine)
    assert set(failures(after)) == {0, 1}
    assert ids(tokens_of(2, before + after)) == answer

    served = run(engine, ask(3))
    assert ids(tokens_of(3, served)) == answer
    assert tokens_of(0, served) == tokens_of(1, served) == []


def test_cancel_frees_rows_wherever_they_are(engine: Engine, answer: list[int]) -> None:
    for row in range(4):
        engine.handle(ask(row, tokens=1000))
    engine.handle(ask(4))  # waits for a place
    engine.handle(ask(5, prompt=3 * PIECE, prompt_logprobs=True))
    for _ in range(4):
        engine.step()
    assert engine.handle(CancelRows([0, 2, 3, 5])) == []
    engine.handle(CancelRows([1]))
    reports = drain(engine)
    assert ids(tokens_of(4, reports)) == answer
    assert {token.row for token in tokens(reports)} == {4}
    assert of(PromptLogprobs, reports) == []


def test_cancelling_rows_unknown_or_finished_is_harmless(engine: Engine, answer: list[int]) -> None:
    engine.handle(CancelRows([17, -1]))
    run(engine, ask(0))
    engine.handle(CancelRows([0]))
    engine.handle(ask(1))
    engine.handle(CancelRows([0, 0]))
    assert ids(tokens_of(1, drain(engine))) == answer


def test_the_last_report_of_the_waiting_says_none(engine: Engine) -> None:
    """Also when those that waited were cancelled, so that no step follows."""
    for row in range(6):
        engine.handle(ask(row, tokens=1000))
    engine.handle(ask(6, prompt=3 * PIECE, prompt_logprobs=True))
    assert of(StepOutput, engine.step())[0].waiting == 3
    (last,) = engine.handle(CancelRows(list(range(7))))
    assert isinstance(last, StepOutput)
    assert (last.tokens, last.waiting) == ([], 0)
    assert engine.pause is None


def test_waiting_counts_the_rows_of_all_models(engine: Engine, tiny_path: Path) -> None:
    load(engine, tiny_path, "second")
    for row in range(7):
        engine.handle(ask(row, tokens=1000))
    for row in range(7, 12):
        engine.handle(ask(row, tokens=1000, model="second"))
    reports = until(engine, lambda reports: {0, 7} <= {t.row for t in tokens(reports)})
    assert of(StepOutput, reports)[-1].waiting == 3 + 1


@pytest.mark.parametrize("prompt", [1, 2, 3 * PIECE])
def test_a_row_may_be_scored_only(engine: Engine, prompt: int) -> None:
    reports = run(engine, ask(0, prompt=prompt, tokens=0, prompt_logprobs=True))
    assert reports[0] == Admitted(0)
    (scored,) = of(PromptLogprobs, reports)
    assert len(scored.logprobs) == prompt - 1
    assert tokens_of(0, reports) == []
    assert of(StepOutput, reports)[-1].waiting == 0
    assert engine.pause is None


@pytest.mark.parametrize("prompt", [1, 6, 2 * PIECE + 1])
def test_a_scored_row_goes_on_as_one_that_is_not(engine: Engine, prompt: int) -> None:
    sampling = SamplingParams(temperature=0, logprobs=2)
    reports = run(
        engine,
        ask(0, prompt=prompt, sampling=sampling, prompt_logprobs=True),
        ask(1, prompt=prompt, sampling=sampling),
    )
    (scored,) = of(PromptLogprobs, reports)
    assert {len(entry.top) for entry in scored.logprobs} <= {2}
    assert ids(tokens_of(0, reports)) == ids(tokens_of(1, reports))
    assert Prefilled(0, 0) in reports  # scored it was, but not known from before
    first = next(i for i, r in enumerate(reports) if tokens_of(0, [r]))
    assert reports.index(scored) < first


def test_prompts_are_scored_one_after_the_other(engine: Engine) -> None:
    """Each holds a cache while it is scored, and takes its time from the rows that decode."""
    for row in (0, 1, 2):
        engine.handle(ask(row, prompt=2 * PIECE + 1, tokens=0, prompt_logprobs=True))
    steps = [[scored.row for scored in of(PromptLogprobs, engine.step())] for _ in range(9)]
    assert steps == [[], [], [0], [], [], [1], [], [], [2]]


def test_scoring_leaves_the_rows_that_decode_their_steps(engine: Engine) -> None:
    engine.handle(ask(0, tokens=50))
    for _ in range(3):
        engine.step()
    engine.handle(ask(1, prompt=3 * PIECE, tokens=0, prompt_logprobs=True))
    assert len(tokens_of(0, engine.step() + engine.step())) == 2
    assert engine.pause == 0


def test_a_scoring_that_fails_fails_alone(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Scoring:
        yield
        raise MemoryError("no room")

    engine.handle(ask(0))
    monkeypatch.setattr(row_admission, "prompt_logprobs", fails)
    reports = run(engine, ask(1, prompt_logprobs=True))
    assert failures(reports) == {1: "MemoryError: no room"}
    assert ids(tokens_of(0, reports)) == answer


def test_a_scored_row_that_can_not_go_on_fails_alone(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Batch, *_: Any) -> None:
        raise MemoryError("no room")

    engine.handle(ask(0))
    monkeypatch.setattr(Batch, "add", fails)
    reports = run(engine, ask(1, prompt=3 * PIECE, prompt_logprobs=True))
    assert failures(reports) == {1: "MemoryError: no room"}
    assert ids(tokens_of(0, reports)) == answer


FAILING = {
    "before the model is called": (PrefillGroups, "_known"),
    "in a prompt": (PrefillBatch, "prompt"),
    "when a row has ended": (RowCache, "store"),
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


Turns = Callable[[int], list[str]]


@pytest.fixture
def turns(engine: Engine, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Whose turn each of the next steps is: "tiny" takes ten times as long as "second"."""
    load(engine, tiny_path, "second")
    clock, step = Clock(), Batch.step
    run_by(clock, engine)

    def timed(self: Batch) -> StepResult:
        done = step(self)
        clock.now += 0.1 if self is engine._batches["tiny"] else 0.01
        return done

    monkeypatch.setattr(Batch, "step", timed)
    return lambda steps: [of(StepOutput, engine.step())[-1].model for _ in range(steps)]


def test_models_get_the_same_time_and_none_starves(engine: Engine, turns: Turns) -> None:
    engine.handle(ask(0, tokens=1000))
    engine.handle(ask(1, tokens=1000, model="second"))
    turns(30)  # before the second model's prompt the first one has had two turns
    seen = turns(110)
    assert 9 <= seen.count("tiny") <= 11
    gaps = "".join("t" if model == "tiny" else "s" for model in seen).split("t")
    assert max(map(len, gaps)) <= 11


@pytest.mark.parametrize("late", ["tiny", "second"])
def test_a_model_that_rested_gets_no_credit_for_it(engine: Engine, turns: Turns, late: str) -> None:
    early = {"tiny": "second", "second": "tiny"}[late]
    engine.handle(ask(0, tokens=1000, model=early))
    assert set(turns(200)) == {early}
    engine.handle(ask(1, tokens=1000, model=late))
    assert set(turns(15)) == {"tiny", "second"}


def test_a_model_that_worked_while_others_rested_owes_them_nothing(
    engine: Engine, turns: Turns
) -> None:
    engine.handle(ask(0, tokens=1000))
    turns(200)
    engine.handle(CancelRows([0]))
    engine.handle(ask(1, tokens=1000, model="second"))
    turns(5)
    engine.handle(ask(2, tokens=1000))
    assert "tiny" in turns(15)


def test_requests_that_end_at_once_do_not_starve_another_model(
    engine: Engine, turns: Turns
) -> None:
    """Each of them begins after a rest, however short."""
    engine.handle(ask(0, tokens=1000, model="second"))
    seen: list[str] = []
    for row in range(1, 20):
        engine.handle(ask(row, tokens=1))
        seen += turns(2)
    assert seen.count("second") > 30


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
    assert reports[-1] == ModelUnloaded("second")
    assert ids(tokens_of(9, before + drain(engine))) == answer

    assert "second" in failures(run(engine, ask(10, model="second")))[10]
    assert of(ModelLoaded, load(engine, tiny_path, "second"))
    assert ids(tokens_of(11, run(engine, ask(11, model="second")))) == answer


def test_a_model_is_unloaded_while_it_loads(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_rate, "MOST_BYTES", 50_000)
    engine = Engine()
    before = active_memory()
    engine.handle(LoadModel("tiny", str(tiny_path)))
    assert of(ModelLoading, engine.step() + engine.step())
    reports = engine.handle(UnloadModel("tiny"))
    assert [failed.model for failed in of(ModelLoadFailed, reports)] == ["tiny"]
    assert reports[-1] == ModelUnloaded("tiny")
    assert engine.pause is None
    assert active_memory() - before < 10_000


def test_unloading_what_is_not_there_is_reported_all_the_same(engine: Engine) -> None:
    assert engine.handle(UnloadModel("absent"))[-1] == ModelUnloaded("absent")


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


def test_neither_does_one_that_is_cancelled(tiny_path: Path) -> None:
    engine = Engine(cache_bytes=1 << 30)
    load(engine, tiny_path)
    engine.handle(LimitCache(0))
    engine.handle(ask(0, prompt=60, tokens=1000))
    until(engine, lambda reports: bool(tokens(reports)))
    assert of(StepOutput, engine.handle(CancelRows([0])))[-1].cache_bytes > 0


def test_one_that_ends_next_to_others_is_kept_if_there_is_room(tiny_path: Path) -> None:
    engine = Engine(cache_bytes=1 << 30)
    load(engine, tiny_path)
    engine.handle(LimitCache(0))
    engine.handle(ask(0, prompt=60, tokens=1000))
    engine.handle(ask(1, prompt=70, tokens=3))
    reports = until(engine, lambda seen: any(t.row == 1 and t.finish for t in tokens(seen)))
    assert of(StepOutput, reports)[-1].cache_bytes == 0


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

    def fails(batch: Batch) -> StepResult:
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
    assert engine._cache.nbytes
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
    assert two._cache.nbytes == of(StepOutput, reports)[-1].cache_bytes == 0
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
        patched.setattr(RowAdmission, "compute_piece", fails)
        two.handle(ask(6, prompt=3 * PIECE, prompt_logprobs=True))
        reports = two.step()
    assert of(DeviceFailed, reports)
    assert set(failures(reports)) == {0, 1, 6}
    with monkeypatch.context() as patched:
        patched.setattr(worker.Engine, "_load_piece", fails)
        two.handle(LoadModel("third", str(tiny_path)))
        reports = two.step()
    assert of(DeviceFailed, reports)
    assert of(ModelLoadFailed, reports)


FAILS_IN: dict[str, tuple[Any, str, Command]] = {
    "cancel": (Batch, "cancel", CancelRows([0])),
    "preempt": (Batch, "preempt", PreemptRows([0])),
    "unload": (PromptCache, "forget", UnloadModel("second")),
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
        assert of(ModelUnloaded, reports) == [ModelUnloaded("second")]
    if name == "adapter":
        assert "adapter_config.json" in of(AdapterFailed, reports)[0].message
    assert tokens_of(7, run(two, ask(7)))


def test_a_gpu_error_in_both_tries_of_a_command_ends_the_process(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError(NO_MEMORY)

    monkeypatch.setattr(AdapterWeights, "load", fails)
    reports = two.handle(LoadAdapter("tiny", "a", "nowhere"))
    assert [failed.ends for failed in of(DeviceFailed, reports)] == [False, True]
    assert not of(AdapterFailed, reports), "its files are not at fault"
    assert two.broken


def test_a_gpu_error_while_rows_are_sampled_is_not_taken_for_a_rows_own(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError(IGNORED)

    monkeypatch.setattr(Sampler, "__call__", fails)
    assert of(DeviceFailed, two.step())


def test_clients_take_turns_with_their_scorings(tiny_path: Path) -> None:
    """One that comes later waits for a piece of each other client's, and not for their ends."""
    engine = Engine()
    load(engine, tiny_path)
    long: dict[str, Any] = {"prompt": 8 * PIECE, "tokens": 0, "prompt_logprobs": True}
    scorings = [
        ask(0, client="many", **long),
        ask(1, client="many", **long),
        ask(2, client="late", **{**long, "prompt": 2 * PIECE}),
    ]
    ended = [report.row for report in of(PromptLogprobs, run(engine, *scorings))]
    assert ended == [2, 0, 1]
