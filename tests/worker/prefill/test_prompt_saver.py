"""Prompts on their way to the disk: how much may wait, and for what."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.engine.messages import ComputeAhead, Generate, LimitCache, LoadModel, UnloadModel
from mlx_server.prompt_files.folder import PromptFolder
from mlx_server.prompt_files.names import PromptFile
from mlx_server.worker.prefill import disk_tier
from tests.worker.prefill.disk_runs import BLOCK, Process, Start, words
from tests.worker.test_kinds import GREEDY

pytestmark = pytest.mark.usefixtures("_at_once")


def test_bytes_that_wait_for_the_disk_are_limited(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk takes nothing, one file waits and no other is prepared."""
    monkeypatch.setattr(limits, "PROMPT_WRITE_BYTES", 1)
    goes_on, write, begun = Event(), PromptFolder.write, []

    def slow(self: PromptFolder, file: PromptFile, pieces: Sequence[memoryview]) -> int:
        begun.append(file)
        goes_on.wait(30)
        return write(self, file, pieces)

    monkeypatch.setattr(PromptFolder, "write", slow)
    process = start(llama, tmp_path)
    process.answer(words(1, 400))
    assert process.engine.pause is None, "it waits for the disk"
    assert len(process.engine._disk._saver._writes) == 1
    assert process.folder
    assert process.folder.count == 0
    goes_on.set()
    process.stop()
    assert process.folder.count == len(begun) == 400 // BLOCK + 1


def test_what_the_disk_has_not_taken_yet_is_waited_for(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk goes on only when the unload waits for it."""
    goes_on, write = Event(), PromptFolder.write

    def held_up(self: PromptFolder, file: PromptFile, pieces: Sequence[memoryview]) -> int:
        goes_on.wait(30)
        return write(self, file, pieces)

    def waited(futures: Sequence[Future[None]], seconds: float) -> None:
        goes_on.set()
        wait(futures, max(seconds, 30))

    monkeypatch.setattr(PromptFolder, "write", held_up)
    monkeypatch.setattr(disk_tier, "wait", waited)
    process, prompt = start(llama, tmp_path), words(1, 200)
    process.answer(prompt)
    assert not goes_on.is_set()
    process.engine.handle(UnloadModel("m"))
    known = process.folder.count if process.folder else 0
    goes_on.set()
    assert known == 200 // BLOCK + 1
    process.load()
    process.answer([*prompt, 1, 2, 3])
    assert process.cached == 200


class Leaving:
    """A prompt that a beginning row evicts in the moment in which it was computed."""

    def __init__(self, process: Process, **fields: Any) -> None:
        self.process, self.prompt = process, words(1, 300)
        process.rows += 1
        first = Generate(process.rows, "m", self.prompt, 1, [], GREEDY, branches=[90, 200])
        for name, value in fields.items():
            setattr(first, name, value)
        process.engine.handle(first)
        while process.engine._is_busy:
            process.engine.step()
        assert process.folder
        assert process.folder.count == 0
        process.engine.handle(Generate(0, "m", words(2, 40), 4, [], GREEDY))
        process.engine.handle(LimitCache(0))
        assert not process.engine._disk._saver._writes, "nothing is copied, and no row waits"

    def asked_again(self) -> int:
        """The tokens that are known of it afterwards."""
        self.process.settle()
        self.process.write()
        assert not self.process.engine._disk._saver._leaving.nbytes
        self.process.engine.handle(LimitCache(1 << 30))
        self.process.answer([*self.prompt, 1, 2, 3])
        return self.process.cached


@pytest.mark.tables
def test_what_a_beginning_row_evicts_is_written_after_it(
    path: Path, tmp_path: Path, start: Start
) -> None:
    leaving = Leaving(start(path, tmp_path))
    assert leaving.asked_again() >= 299
    after = [*leaving.prompt, 1, 2, 3]
    assert leaving.process.answer([*after, 4]) == start(path, None).answer([*after, 4])


@pytest.mark.tables
def test_of_what_is_too_large_to_wait_the_beginning_is_written(
    path: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(path, tmp_path)
    process.answer(words(1, 300), on_disk=False)
    limit = process.engine._cache.nbytes * 9 // 10
    process.engine.handle(LimitCache(0))
    process.engine.handle(LimitCache(1 << 30))
    monkeypatch.setattr(limits, "PROMPT_WRITE_BYTES", limit)
    leaving = Leaving(process)
    assert 0 < process.engine._disk._saver._leaving.nbytes <= limit
    assert 90 <= leaving.asked_again() < 300
    after = [*leaving.prompt, 1, 2, 3]
    assert process.answer([*after, 4]) == start(path, None).answer([*after, 4])


def test_what_the_disk_may_not_or_can_not_have_does_not_wait_for_it(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    private = start(llama, tmp_path / "private")
    assert Leaving(private, on_disk=False).asked_again() == 0
    refused = start(llama, tmp_path / "refused")
    refused.engine._disk._saver._paused_until = float("inf")
    Leaving(refused)
    assert not refused.engine._disk._saver._leaving.nbytes
    invalid = start(llama, tmp_path / "invalid")
    leaving = Leaving(invalid)
    invalid.engine._disk.forget("m")
    assert leaving.asked_again() == 0
    failed = start(llama, tmp_path / "failed")
    leaving = Leaving(failed)
    failed.engine._device_failed(RuntimeError("[METAL] Command buffer execution failed: x"))
    assert leaving.asked_again() == 0


def test_what_is_unloaded_while_a_row_of_another_model_runs_is_written(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 200)
    process.engine.handle(LoadModel("other", str(llama)))
    process.settle()
    process.rows += 1
    process.engine.handle(Generate(process.rows, "m", prompt, 1, [], GREEDY))
    while process.engine._is_busy:
        process.engine.step()
    process.engine.handle(Generate(0, "other", words(2, 40), 4, [], GREEDY))
    process.engine.handle(UnloadModel("m"))
    process.settle()
    process.write()
    process.load()
    process.answer([*prompt, 1, 2, 3])
    assert process.cached == 200


def test_pieces_ahead_and_pieces_for_the_disk_alternate(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_server.worker.ahead.PIECE_SECONDS", 1e-6)
    process, done = start(llama, tmp_path), list[str]()
    process.rows += 1
    process.engine.handle(Generate(process.rows, "m", words(1, 400), 1, [], GREEDY))
    while process.engine._is_busy:
        process.engine.step()
    ahead, saver = process.engine._ahead, process.engine._disk._saver

    def noted(name: str, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            done.append(name)
            return work(argument)

        return run

    monkeypatch.setattr(ahead, "step", noted("ahead", ahead.step))
    monkeypatch.setattr(saver, "save_piece", noted("disk", saver.save_piece))
    tokens = [*words(1, 400), *words(2, 1500)]
    process.engine.handle(ComputeAhead("m", tokens, 4096))
    process.settle()
    assert done[:6] == ["disk", "ahead"] * 3
    process.answer([*tokens, 1, 2])
    assert process.cached == len(tokens)


def test_nothing_is_written_between_steps_but_single_pieces(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "OLD_SECONDS", 0.0)
    monkeypatch.setattr(disk_tier, "BUSY_SECONDS", 0.0)
    pieces: list[int] = []
    save = disk_tier.PromptSaver.save_piece

    def counted(self: Any, prompt: Any) -> None:
        pieces.append(len(process.reports))
        save(self, prompt)

    process = start(llama, tmp_path)
    monkeypatch.setattr(disk_tier.PromptSaver, "save_piece", counted)
    process.answer(words(1, 300), tokens=40)
    assert process.folder
    busy = [at for at in pieces if at < len(process.reports)]
    assert busy, "some were written while the row decoded"
    process.write()
    assert process.folder.count > 0
