"""Prompts that come back from disk: when they are written and read, and which are not."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Event
from typing import Any

import mlx.core as mx
import pytest

from mlx_server import limits
from mlx_server.engine.messages import (
    CancelRows,
    ComputeAhead,
    ComputedAhead,
    Generate,
    LimitCache,
    LoadModel,
    Prefilled,
    StepOutput,
    UnloadModel,
)
from mlx_server.prompt_files import PromptFile, PromptFolder
from mlx_server.requests import Tier
from mlx_server.worker.batch import Batch
from mlx_server.worker.prefill import disk_tier
from tests.tables import cases
from tests.worker.bench import GREEDY, Bench
from tests.worker.engine_runs import failures
from tests.worker.kinds import SIZES
from tests.worker.lora_files import mlx_adapter, network
from tests.worker.one_pass import expected
from tests.worker.prefill.disk_runs import BLOCK, Process, Start, words

pytestmark = pytest.mark.usefixtures("_at_once")


@pytest.mark.slow
def test_sessions_with_restarts_in_the_middle(path: Path, tmp_path: Path, start: Start) -> None:
    """Thoughts of earlier turns are dropped, so each prompt leaves the one before."""
    model, process = network(path), start(path, tmp_path)
    history, prompt_tokens, seen, again = words(7, 200), 0, [0], 0
    for turn in range(6):
        last = len(history)
        history += words(20 + turn, 80)
        prompt = [*history, 301, 302]
        places: dict[str, Any] = {"branches": [200, last, len(history)]}
        places["continued_from"] = len(history)
        answer = process.answer(prompt, **places)
        assert answer == expected(model, prompt, answer, 8)
        again += max(0, min(seen[-1], len(prompt)) - process.known)
        prompt_tokens += len(prompt)
        seen.append(len(history))
        history += answer[4:]
        if turn in (1, 3):
            process.stop()
            process = start(path, tmp_path)
    assert again <= 0.02 * prompt_tokens


@pytest.mark.slow
def test_a_long_session_takes_the_disk_of_one_cache(
    path: Path, tmp_path: Path, start: Start
) -> None:
    process = start(path, tmp_path)
    history = words(1, 200)
    for turn in range(12):
        history += words(30 + turn, 36)
        history += process.answer(history, 2, branches=[200, len(history) - 36, len(history)])
    assert process.folder
    process.write()
    memory = process.engine.prompts.memory.nbytes
    overhead = 4096 + 2048 * 2  # of each file: the rest of a unit, and its header
    assert process.folder.nbytes <= 1.5 * memory + overhead * process.folder.count
    assert process.folder.count <= len(history) // BLOCK + 20


def test_a_server_next_to_it_reads_what_one_has_written(
    path: Path, tmp_path: Path, start: Start
) -> None:
    prompt = words(5, 300)
    one, other = start(path, tmp_path), start(path, tmp_path)
    assert one.folder
    assert other.folder
    os.utime(one.folder.path, (0, 0))  # longer ago than a tick of the file system's clock
    assert other.answer(words(6, 40)) is not None
    answer = one.answer(prompt)
    one.write()
    while not other.folder.is_stale:  # a folder is not read again right after it was read
        other.step()
    assert other.answer(prompt) == answer
    assert other.known >= 256


def test_a_row_waits_for_no_scan_of_a_folder_with_nothing_for_it(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan of 17,000 files takes 70 ms, and is due again whenever another server writes."""
    one, other = start(llama, tmp_path), start(llama, tmp_path)
    assert other.folder
    os.utime(other.folder.path, (0, 0))  # longer ago than a tick of the file system's clock
    one.answer(words(5, 300))
    one.write()
    while not other.folder.is_stale:  # a folder is not read again right after it was read
        other.step()
    with monkeypatch.context() as patch:
        patch.delattr(PromptFolder, "scan")
        assert other.answer(words(6, 300)) == Bench(llama).answer(words(6, 300), tokens=8)
        other.answer(words(5, 300))
    assert other.known >= 256, "blocks are found by their names"


def test_a_prompt_that_parts_within_a_block_uses_the_blocks_before(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 5 * BLOCK)
    process.answer(prompt)
    process.write()
    process.forget_memory()
    other = [*prompt[: 2 * BLOCK + BLOCK // 2], *words(9, 40)]
    assert process.answer(other) == Bench(llama).answer(other, tokens=8)
    assert process.known == 2 * BLOCK


@pytest.mark.slow
def test_a_prompt_comes_back_though_the_prompt_cache_has_no_room(
    path: Path, tmp_path: Path, start: Start
) -> None:
    """Its row has the memory for it, and nothing is kept once it has begun."""
    process, first = start(path, tmp_path), words(1, 5 * BLOCK)
    process.answer(first)
    process.write()
    process.handle(LimitCache(0))
    process.answer([*first, *words(9, 40)])
    assert process.known >= len(first) - 1
    process.handle(LimitCache(0))
    assert process.engine.prompts.memory.known(("m", None, 1.0, ""), first) == 0


@cases
def test_no_other_key_or_adapter_hits(
    llama: Path, tmp_path: Path, start: Start, other: dict[str, Any]
) -> None:
    """Neither on disk nor in memory."""
    adapter, prompt = mlx_adapter(tmp_path / "lora", llama), words(1, 200)
    first = start(llama, tmp_path / "disk", adapter=adapter)
    first.answer(prompt)
    first.answer(prompt, **other)
    assert first.known == 0
    first.answer(prompt)
    assert first.known == 199
    first.stop()
    second = start(llama, tmp_path / "disk", adapter=adapter)
    second.answer(prompt, cache_scope="a third key")
    assert second.known == 0
    second.answer(prompt, **other)
    assert second.known == 199


@pytest.mark.parametrize("is_stored", [True, False])
def test_what_a_request_does_not_want_stored_stays_off_the_disk(
    llama: Path, tmp_path: Path, start: Start, is_stored: bool
) -> None:
    """Nor what is computed ahead for it."""
    process, prompt, answer = start(llama, tmp_path), words(1, 200), words(2, 200)
    process.answer(prompt, on_disk=is_stored)
    process.handle(ComputeAhead("m", [*prompt, *answer], 4096, on_disk=is_stored))
    process.finish()
    computed = [r.computed for r in process.reports if isinstance(r, ComputedAhead)]
    assert sum(computed) >= len(answer)
    process.answer([*prompt, *words(3, 50)], on_disk=False)
    process.stop()
    after = start(llama, tmp_path)
    after.answer([*prompt, *words(3, 50)], on_disk=False)
    assert after.known == (200 if is_stored else 0)
    after.answer([*prompt, *answer, 1, 2])
    assert after.known == (len(prompt) + len(answer) if is_stored else 200)


def refuse(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses a file, so that nothing is written for a while."""

    def refuses(*arguments: Any) -> int:
        raise OSError(28, "full")

    with monkeypatch.context() as patched:
        patched.setattr(PromptFolder, "write", refuses)
        process.answer(words(99, 200))
        process.write()


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_model_that_computes_invalid_values_leaves_no_files(
    llama: Path,
    tmp_path: Path,
    start: Start,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while nothing is written because the disk has refused a file."""
    process = start(llama, tmp_path)
    process.answer(words(1, 200))
    process.write()
    assert process.folder
    assert process.folder.count > 0
    if is_refused:
        refuse(process, monkeypatch)
    norm = process.batch.model.model.norm
    norm.weight = mx.full(norm.weight.shape, float("nan"))
    process.answer(words(2, 200))
    assert failures(process.reports)
    process.stop()
    assert process.folder.count == 0


def test_bytes_that_wait_for_the_disk_are_limited(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk takes nothing, one file waits and no other is prepared; an unload waits for
    what is not written."""
    monkeypatch.setattr(limits, "PROMPT_WRITE_BYTES", 1)
    goes_on, write, begun = Event(), PromptFolder.write, list[PromptFile]()

    def slow(self: PromptFolder, file: PromptFile, pieces: Sequence[memoryview]) -> None:
        begun.append(file)
        goes_on.wait(30)
        write(self, file, pieces)

    def waited(futures: Sequence[Future[None]], seconds: float) -> None:
        goes_on.set()
        wait(futures, max(seconds, 30))

    monkeypatch.setattr(PromptFolder, "write", slow)
    monkeypatch.setattr(disk_tier, "wait", waited)
    process = start(llama, tmp_path)
    process.answer(prompt := words(1, 400))
    assert process.engine.pause is None, "it waits for the disk"
    assert process.folder
    assert (len(begun), process.folder.count) == (1, 0)
    process.handle(UnloadModel("m"))
    assert process.folder.count == len(begun) == 400 // BLOCK + 2  # the ends of prompt and answer
    process.load()
    process.answer([*prompt, 1, 2, 3])
    assert process.known == 399


class Leaving:
    """A prompt that a beginning row evicts in the moment in which it was computed."""

    def __init__(self, process: Process, **fields: Any) -> None:
        self.process, self.prompt = process, words(1, 300)
        process.answer_without_writing(self.prompt, branches=[90, 200], **fields)
        assert process.folder
        self.files = process.folder.count
        process.handle(Generate(0, "m", words(2, 40), 4, [], GREEDY))
        process.handle(LimitCache(0))
        assert process.folder.count == self.files, "nothing is copied, and no row waits"

    def asked_again(self) -> int:
        """The tokens that are known of it afterwards."""
        self.process.finish()
        self.process.write()
        self.process.handle(LimitCache(1 << 30))
        self.process.answer([*self.prompt, 1, 2, 3])
        return self.process.known


@pytest.mark.slow
@pytest.mark.parametrize("is_too_large", [False, True])
def test_what_a_beginning_row_evicts_is_written_after_it(
    path: Path,
    tmp_path: Path,
    start: Start,
    is_too_large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what is too large to wait, the beginning."""
    process = start(path, tmp_path)
    if is_too_large:
        process.answer(words(1, 300), on_disk=False)
        limit = process.engine.prompts.memory.nbytes * 9 // 10
        process.forget_memory()
        monkeypatch.setattr(limits, "PROMPT_WRITE_BYTES", limit)
    leaving = Leaving(process)
    if is_too_large:
        assert 0 < process.engine.prompts.disk.saver.leaving_bytes <= limit
        assert 90 <= leaving.asked_again() < 299
    else:
        assert leaving.asked_again() >= 299
    assert process.engine.prompts.disk.saver.leaving_bytes == 0
    after = [*leaving.prompt, 1, 2, 3, 4]
    assert process.answer(after) == start(path, None).answer(after)


@pytest.mark.parametrize("why", ["private", "refused", "invalid", "failed"])
def test_what_the_disk_may_not_or_can_not_have_does_not_wait_for_it(
    llama: Path, tmp_path: Path, start: Start, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(llama, tmp_path)
    if why == "refused":
        refuse(process, monkeypatch)
    leaving = Leaving(process, on_disk=why != "private")
    if why == "invalid":
        process.engine.prompts.forget(("m", None, 1.0, ""))
    if why == "failed":

        def fails(self: Batch, tier: Tier | None = None) -> None:
            raise RuntimeError("[METAL] Command buffer execution failed: x")

        with monkeypatch.context() as patched:
            patched.setattr(Batch, "step", fails)
            process.engine.step()
    assert process.engine.prompts.disk.saver.leaving_bytes == 0
    if why != "refused":
        assert leaving.asked_again() == 0


def test_what_is_unloaded_while_a_row_of_another_model_runs_is_written(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 200)
    process.handle(LoadModel("other", str(llama)))
    process.finish()
    process.answer_without_writing(prompt)
    process.handle(Generate(0, "other", words(2, 40), 4, [], GREEDY))
    process.handle(UnloadModel("m"))
    process.finish()
    process.write()
    process.load()
    process.answer([*prompt, 1, 2, 3])
    assert process.known == 199


def test_a_prompt_is_taken_over_in_pieces_between_the_steps_of_other_rows(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is admitted in the step of the last piece: later nothing would wake the engine."""
    process, prompt = start(llama, tmp_path), words(1, 400)
    process.answer(prompt)
    process.stop()
    monkeypatch.setattr(disk_tier, "TAKEN_BYTES", 1)
    after = start(llama, tmp_path)
    other = after.begin(words(2, 20), 60)
    while not any(isinstance(report, StepOutput) for report in after.engine.step()):
        pass
    row, tokens = after.begin(prompt), []
    while after.is_reading(row):
        outputs = [each for each in after.engine.step() if isinstance(each, StepOutput)]
        tokens += [token.row for output in outputs for token in output.tokens]
    arrays = 2 * SIZES["num_hidden_layers"]
    assert tokens.count(other) >= arrays - 1, "a token of the other row comes after each array"
    assert after.engine.doing == "generating"


@pytest.mark.parametrize("command", [CancelRows([1]), UnloadModel("m")])
def test_a_row_that_leaves_while_its_prompt_is_read(
    llama: Path, tmp_path: Path, start: Start, command: CancelRows | UnloadModel
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 300)
    process.answer(prompt)
    process.stop()
    after = start(llama, tmp_path)
    assert after.is_reading(after.begin(prompt, 3))
    after.handle(command)
    while after.is_reading(1):
        after.finish()
    if isinstance(command, UnloadModel):
        after.load()
    assert after.answer([*prompt, 5]) == start(llama, None).answer([*prompt, 5])
    assert after.known >= 299, "what was read is kept for others, and the files are"


def test_rows_that_wait_for_the_same_prompt_are_admitted_together(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 200)
    process.answer(prompt)
    process.stop()
    after = start(llama, tmp_path)
    rows = [after.begin([*prompt, row]) for row in range(6)]
    assert all(map(after.is_reading, rows))
    assert after.engine.doing == "reading a prompt of m from disk"
    deadline = time.monotonic() + 30
    while any(map(after.is_reading, rows)) and time.monotonic() < deadline:
        after.step()
    assert after.engine.doing == "generating"
    after.finish()
    assert after.total("hits") == 1
    known = [each.cached_tokens for each in after.reports if isinstance(each, Prefilled)]
    assert known == [199] * 6
