"""Prompts that come from the disk, while rows wait for them or no longer do."""

import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from mlx_server.engine.messages import CancelRows, Generate, LimitCache, StepOutput, UnloadModel
from mlx_server.worker.prefill import disk_tier
from tests.worker.kinds import SIZES
from tests.worker.prefill.disk_runs import Start, words
from tests.worker.test_kinds import GREEDY

pytestmark = pytest.mark.usefixtures("_at_once")


def test_a_prompt_is_taken_over_in_pieces_between_the_steps_of_other_rows(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 400)
    process.answer(prompt)
    process.stop()
    monkeypatch.setattr(disk_tier, "TAKEN_BYTES", 1)
    engine = start(llama, tmp_path).engine
    engine.handle(Generate(1, "m", words(2, 20), 60, [], GREEDY))
    while not any(isinstance(report, StepOutput) for report in engine.step()):
        pass
    engine.handle(Generate(2, "m", prompt, 8, [], GREEDY))
    engine.step()
    loading = engine._disk._restorer._loading
    assert loading
    wait([loading], 30)
    tokens = 0
    while engine._disk.is_reading(2):
        outputs = [report for report in engine.step() if isinstance(report, StepOutput)]
        tokens += sum(token.row == 1 for output in outputs for token in output.tokens)
    arrays = 2 * SIZES["num_hidden_layers"]
    assert tokens >= arrays - 1, "a token of the other row comes after each array"


def test_a_row_is_admitted_in_the_step_in_which_its_prompt_has_been_read(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    """Later nothing would wake the engine for it."""
    process, prompt = start(llama, tmp_path), words(1, 400)
    process.answer(prompt)
    process.stop()
    engine = start(llama, tmp_path).engine
    engine.handle(Generate(1, "m", prompt, 8, [], GREEDY))
    assert engine._disk.is_reading(1)
    while engine._disk.is_reading(1):
        engine.step()
    assert 1 not in engine._admission.waiting


def test_a_row_that_is_cancelled_while_its_prompt_is_read(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process = start(llama, tmp_path)
    prompt = words(1, 300)
    process.answer(prompt)
    process.stop()
    after = start(llama, tmp_path)
    after.engine.handle(Generate(77, "m", prompt, 3, [], GREEDY))
    assert after.engine._disk.is_reading(77)
    after.engine.handle(CancelRows([77]))
    after.settle()
    assert after.answer([*prompt, 5]) == start(llama, None).answer([*prompt, 5])
    assert after.cached == 299, "what was read is kept for others"


def test_a_model_that_is_unloaded_while_a_prompt_is_read(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process = start(llama, tmp_path)
    prompt = words(1, 300)
    process.answer(prompt)
    process.stop()
    after = start(llama, tmp_path)
    after.engine.handle(Generate(77, "m", prompt, 3, [], GREEDY))
    after.engine.handle(UnloadModel("m"))
    deadline = time.monotonic() + 10
    while after.engine._disk.is_reading(77) and time.monotonic() < deadline:
        after.settle()
    after.load()
    after.answer(prompt)
    assert after.cached == 299


def test_prompts_that_the_disk_does_not_have_wait_for_no_file(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    """Short ones have all states of the model after their beginning; one by one, each waited while
    the file of another prompt was read."""
    process = start(llama, tmp_path)
    for seed in range(3):
        process.answer(words(seed, 50))
    process.stop()
    engine = start(llama, tmp_path).engine
    waits = []
    for row in range(8):
        engine.handle(Generate(row, "m", words(100 + row, 50), 2, [], GREEDY))
        waits.append(engine._disk.is_reading(row))
        while engine._disk.is_reading(row):
            engine.step()
    assert waits == [True, *[False] * 7], "only the last used state has to be read, and once"


def test_what_differs_within_the_last_block_comes_back(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process, prompts = start(llama, tmp_path), [words(seed, 50) for seed in range(3)]
    for prompt in prompts:
        process.answer(prompt)
    process.engine.handle(LimitCache(0))
    process.engine.handle(LimitCache(1 << 30))
    for prompt in prompts:
        process.answer([*prompt[:40], *words(9, 5)])
        assert process.cached == 40


def test_rows_that_wait_for_the_same_prompt_are_admitted_together(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 200)
    process.answer(prompt)
    process.stop()
    after = start(llama, tmp_path)
    engine = after.engine
    for row in range(6):
        engine.handle(Generate(row, "m", [*prompt, row], 2, [], GREEDY))
    assert len(engine._admission.waiting) == 6
    while engine._disk.is_reading(0):
        after.reports += engine.step()
    assert not engine._admission.waiting
    after.settle()
    assert after.total("hits") == 1
