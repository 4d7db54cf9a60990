"""Disks and folders that fail or are changed by others: a miss and a line in the log, and the same
answers as a cold engine's."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_server.engine.messages import Generate, LimitCache
from mlx_server.prompt_files import contents
from mlx_server.prompt_files import folder as folders
from mlx_server.prompt_files.contents import DamagedFile, RawTensor, encoded, written
from mlx_server.prompt_files.names import parsed
from mlx_server.worker.prefill import disk_tier
from tests.worker.kinds import KINDS
from tests.worker.prefill.disk_runs import BLOCK, Process, words
from tests.worker.test_kinds import GREEDY

PROMPT, OTHER = words(1, 200), words(2, 200)
FILES = 200 // BLOCK + 1


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "IDLE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[0].save(tmp_path_factory.mktemp("failures") / "llama")


@pytest.fixture(scope="module")
def answer(llama: Path) -> list[int]:
    return Process(llama, None).answer(PROMPT)


@pytest.fixture
def saved(llama: Path, tmp_path: Path) -> Path:
    """A folder with the files of two prompts."""
    process = Process(llama, tmp_path)
    for prompt in (PROMPT, OTHER):
        process.answer(prompt)
    process.stop()
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.name != folders.LOCK)


def raising(code: int) -> Callable[..., Any]:
    def fails(*arguments: Any, **named: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fails


def open_of(part: str, code: int) -> Callable[..., int]:
    """`os.open`, which fails for files whose names have this part."""
    opened = os.open

    def open_or_fail(path: Any, *arguments: Any, **named: Any) -> int:
        return (raising(code) if part in os.fspath(path) else opened)(path, *arguments, **named)

    return open_or_fail


def half_written(code: int) -> Callable[..., None]:
    def write(opened: Any, part: memoryview) -> None:
        opened.write(part[: len(part) // 2])
        raise OSError(code, os.strerror(code))

    return write


WRITES: dict[str, tuple[Any, str, Any]] = {
    "no room": (folders, "_write_all", half_written(errno.ENOSPC)),
    "quota": (folders, "_write_all", half_written(errno.EDQUOT)),
    "a bad disk": (folders, "_write_all", half_written(errno.EIO)),
    "read-only": (os, "open", open_of(folders.DRAFT, errno.EROFS)),
    "not allowed": (os, "open", open_of(folders.DRAFT, errno.EACCES)),
    "not renamed": (os, "replace", raising(errno.ENOSPC)),
    "unmounted": (shutil, "disk_usage", raising(errno.ENOENT)),
}


@pytest.mark.slow
@pytest.mark.parametrize("why", WRITES)
def test_a_disk_that_takes_nothing_until_it_does(
    llama: Path, tmp_path: Path, answer: list[int], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(llama, tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*WRITES[why])
        assert process.answer(PROMPT) == answer
        process.answer(OTHER)
        process.write()
    assert caplog.text.count("can't be written to disk") == 1
    assert files(tmp_path) == [], "no part of a file is left"
    assert process.folder
    assert process.folder.nbytes == process.folder.count == 0
    process.engine._disk._saver._paused_until = 0.0
    process.engine.handle(LimitCache(0))
    process.engine.handle(LimitCache(1 << 30))
    assert process.answer(PROMPT) == answer
    process.stop()
    assert len(files(tmp_path)) >= FILES


READS: dict[str, Callable[[], tuple[Any, str, Any]]] = {
    "not allowed": lambda: (os, "open", open_of(".safetensors", errno.EACCES)),
    "a bad disk": lambda: (contents, "_checked_bytes", raising(errno.EIO)),
    "unmounted": lambda: (os, "open", open_of(".safetensors", errno.ESTALE)),
}


@pytest.mark.parametrize("why", READS)
def test_files_that_cant_be_read(
    llama: Path, saved: Path, answer: list[int], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(llama, saved)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*READS[why]())
        assert process.answer(PROMPT) == answer
        assert process.cached == 0
    assert "can't be read" in caplog.text
    process.stop()
    again = Process(llama, saved)
    assert again.answer(PROMPT) == answer
    assert again.cached == 199, "they were written again"
    again.stop()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM], ids=os.strerror)
def test_files_are_kept_where_something_else_is_short(
    llama: Path, saved: Path, answer: list[int], code: int
) -> None:
    process, before = Process(llama, saved), files(saved)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", open_of(".safetensors", code))
        assert process.answer(PROMPT) == answer
        assert process.cached == 0
    assert set(before) <= set(files(saved))
    process.engine.handle(LimitCache(0))
    process.engine.handle(LimitCache(1 << 30))
    assert process.answer(PROMPT) == answer
    assert process.cached == 199
    process.stop()


@pytest.mark.parametrize("size", [1, 8, 31, 32, 33, "half", "all but one byte"])
def test_a_file_that_is_cut_short(
    llama: Path, saved: Path, answer: list[int], size: int | str
) -> None:
    for path in files(saved):
        whole = path.stat().st_size
        named = {"half": whole // 2, "all but one byte": whole - 1}
        os.truncate(path, size if isinstance(size, int) else named[size])
    process = Process(llama, saved)
    assert process.answer(PROMPT) == answer
    assert process.cached == 0
    process.stop()


def test_a_file_that_is_cut_short_while_it_is_read(
    llama: Path, saved: Path, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first piece."""

    class CutsFiles:
        def update(self, piece: bytes) -> None:
            for path in files(saved):
                os.truncate(path, 100)

    process = Process(llama, saved)
    monkeypatch.setattr(contents, "PIECE_BYTES", 64)
    monkeypatch.setattr(contents, "sha256", CutsFiles)
    assert process.answer(PROMPT) == answer
    assert process.cached == 0
    monkeypatch.undo()
    process.stop()


@pytest.mark.parametrize("name", ["FORMAT", "mlx", "mlx-lm"])
def test_files_of_another_version_are_not_used(
    llama: Path, saved: Path, answer: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "FORMAT":
        monkeypatch.setattr(disk_tier, "FORMAT", "0")
    else:
        monkeypatch.setattr(
            disk_tier, "version", lambda each: "0.0.1" if each == name else version(each)
        )
    before = files(saved)
    process = Process(llama, saved)
    assert process.answer(PROMPT) == answer
    assert process.cached == 0
    process.stop()
    assert set(before) < set(files(saved)), "they are for servers of that version"


def test_files_with_one_anothers_contents(llama: Path, saved: Path, answer: list[int]) -> None:
    """Each is whole, with a right checksum."""
    paths = files(saved)
    bodies = [path.read_bytes() for path in paths]
    for path, body in zip(paths, [*bodies[1:], bodies[0]], strict=True):
        path.write_bytes(body)
    process = Process(llama, saved)
    assert process.answer(PROMPT) == answer
    assert process.cached == 0
    process.stop()


def test_files_whose_tokens_are_not_those_of_their_names(
    llama: Path, saved: Path, answer: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Name and checksum are right: the tokens and the arrays are of another prompt."""
    for path in files(saved):
        file = parsed(path.name)
        assert file
        found = contents.read(path, file, 1 << 30)
        tensors = {
            name: RawTensor(dtype, items.shape, memoryview(items[::-1].tobytes()))
            for name, (dtype, items) in found.tensors.items()
        }
        ids = (found.ids + np.uint32(1)).astype(np.uint32)
        path.write_bytes(b"".join(written(encoded(file, ids, found.about, tensors))))
        assert contents.read(path, file, 1 << 30)
    process = Process(llama, saved)
    assert process.answer(PROMPT) == answer
    assert process.cached == 0
    assert "other tokens than its name says" in caplog.text
    process.stop()


@pytest.mark.parametrize("gone", ["files", "folder"])
def test_what_vanishes_between_the_lookup_and_the_read(
    llama: Path, saved: Path, answer: list[int], gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(llama, saved)
    engine = process.engine
    engine.handle(Generate(77, "m", PROMPT, 1, [], GREEDY, on_disk=False))
    assert engine._disk.is_reading(77), "the folder's index has it"
    if gone == "files":
        for path in files(saved):
            path.unlink()
    else:
        shutil.rmtree(saved)
    while engine._disk.is_reading(77):
        process.reports += engine.step()
    assert process.folder
    assert process.folder.count == 0, "no row waits for them again"
    process.settle()
    assert process.answer(PROMPT) == answer
    process.stop()
    assert not any(record.exc_info for record in caplog.records)


def test_a_folder_that_a_link_leads_to_is_used_and_a_linked_lock_is_not(
    llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    process = Process(llama, tmp_path / "link")
    process.answer(PROMPT)
    process.stop()
    assert len(files(tmp_path / "elsewhere")) >= FILES
    (tmp_path / "elsewhere" / folders.LOCK).unlink()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "elsewhere" / folders.LOCK).symlink_to(tmp_path / "mine")
    assert disk_tier.opened(tmp_path / "link", 1 << 30) is None
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_linked_file_is_not_read(llama: Path, saved: Path, tmp_path: Path) -> None:
    path = files(saved)[0]
    file = parsed(path.name)
    assert file
    os.rename(path, saved / "moved")
    path.symlink_to(saved / "moved")
    with pytest.raises((OSError, DamagedFile)):
        contents.read(path, file, 1 << 30)


def test_a_clock_that_was_set_back_turns_no_order_around(llama: Path, saved: Path) -> None:
    """The files are of tomorrow. What is used later is kept longer all the same, also after a
    restart."""
    tomorrow = time.time_ns() + 24 * 3600 * 10**9
    for at, path in enumerate(files(saved)):
        os.utime(path, ns=(tomorrow + at, tomorrow + at))
    most = 2 * sum(path.stat().st_blocks * 512 for path in files(saved))
    for seeds in (range(10, 13), range(13, 16)):
        process = Process(llama, saved, most)
        for seed in seeds:
            process.answer(words(seed, 200))
            process.write()
        process.stop()
    after = Process(llama, saved, most)
    known = []
    for prompt in (words(15, 200), words(14, 200), PROMPT):
        after.answer(prompt)
        known.append(after.cached)
    after.stop()
    assert known == [199, 199, 0]
