"""Errors of the GPU: what they fail, and when they end the process."""

from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.messages import (
    AdapterFailed,
    CancelRows,
    Command,
    DeviceFailed,
    LoadAdapter,
    LoadModel,
    ModelLoadFailed,
    ModelUnloaded,
    PreemptRows,
    Prefilled,
    Report,
    StepOutput,
    UnloadModel,
)
from mlx_server.requests import Tier
from mlx_server.worker import engine
from mlx_server.worker.batch import Batch, StepResult
from mlx_server.worker.engine import Engine
from mlx_server.worker.lora_adapters import AdapterWeights
from mlx_server.worker.prefill.memory_tier import MemoryTier
from mlx_server.worker.prefill_groups import PrefillGroups
from mlx_server.worker.rows import PIECE, RowAdmission
from mlx_server.worker.sampling import Sampler
from tests.worker.batch_runs import ids
from tests.worker.engine_runs import ask, failures, load, of, run, tokens, tokens_of, until

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
        patched.setattr(RowAdmission, "compute_piece", fails)
        two.handle(ask(6, prompt=3 * PIECE, prompt_logprobs=True))
        reports = two.step()
    assert of(DeviceFailed, reports)
    assert set(failures(reports)) == {0, 1, 6}
    with monkeypatch.context() as patched:
        patched.setattr(engine.Engine, "_load_piece", fails)
        two.handle(LoadModel("third", str(tiny_path)))
        reports = two.step()
    assert of(DeviceFailed, reports)
    assert of(ModelLoadFailed, reports)


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


@pytest.mark.slow
def test_a_gpu_error_while_rows_are_sampled_is_not_taken_for_a_rows_own(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError(IGNORED)

    monkeypatch.setattr(Sampler, "__call__", fails)
    assert of(DeviceFailed, two.step())
