"""Damaged, forged and missing files, and disks that fail: a miss and a line in the log, and the
same answers as a cold engine's."""

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

from mlx_server import prompt_files
from mlx_server.models.files import read_header_of
from mlx_server.prompt_files import (
    CHECKSUM,
    DRAFT,
    LOCK,
    TOKENS,
    PromptFile,
    RawTensor,
    encoded,
    parsed,
    written,
)
from mlx_server.worker.prefill import disk_tier
from tests.worker.prefill.disk_runs import BLOCK, Process, words

pytestmark = pytest.mark.usefixtures("_at_once")

PROMPT, OTHER = words(1, 200), words(2, 200)
BRANCHES = [70, 150]


class Saved:
    """The files of two prompts, and the answer of an engine that never saw them."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.answer = Process(self.path, None).answer(PROMPT)
        process = Process(self.path, self.folder)
        for prompt in (PROMPT, OTHER):
            process.answer(prompt, branches=BRANCHES)
        process.stop()

    def copied(self, folder: Path) -> list[Path]:
        shutil.copytree(self.folder, folder)
        return files(folder)

    def asked(self, folder: Path) -> int:
        """Asks again. Returns how many tokens were known."""
        process = Process(self.path, folder)
        assert process.answer(PROMPT) == self.answer
        process.stop()
        return process.known


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def saved(
    request: pytest.FixtureRequest,
    made: Callable[[str], Path],
    _at_once: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    return Saved(made(request.param), tmp_path_factory.mktemp("files"))


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if parsed(each.name))


def file_of(path: Path) -> PromptFile:
    file = parsed(path.name)
    assert file
    return file


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_damaged_bytes(
    saved: Saved, tmp_path: Path, kept: float, caplog: pytest.LogCaptureFixture
) -> None:
    """test_prompt_files.py changes each of them."""
    paths = saved.copied(tmp_path / "d")
    for path in paths:
        body = path.read_bytes()
        path.write_bytes(body[: min(len(body) - 1, int(kept * len(body)))])
    assert saved.asked(tmp_path / "d") == 0
    lines = [line for line in caplog.messages if "was removed" in line]
    assert 1 <= len(lines) <= len(paths)


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "giant", "nothing", "no folder"])
def test_what_took_a_files_place_after_the_lookup(
    saved: Saved, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    paths = saved.copied(tmp_path / "d")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(paths[0].read_bytes())
    process = Process(saved.path, tmp_path / "d")
    for path in paths:
        path.unlink()
        match what:
            case "link":
                path.symlink_to(elsewhere)
            case "pipe":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "giant":
                with path.open("wb") as file:
                    file.truncate(1 << 40)
    if what == "no folder":
        shutil.rmtree(tmp_path / "d")
    assert process.answer(PROMPT) == saved.answer
    assert process.known == 0
    process.stop()
    assert elsewhere.exists()
    assert not any(record.exc_info for record in caplog.records)


def test_a_file_that_is_cut_short_while_it_is_read(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first piece."""

    class CutsFiles:
        def update(self, piece: bytes) -> None:
            for path in files(tmp_path / "d"):
                os.truncate(path, 100)

    saved.copied(tmp_path / "d")
    process = Process(saved.path, tmp_path / "d")
    row = process.begin(PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr(prompt_files, "PIECE_BYTES", 64)
        patched.setattr(prompt_files, "sha256", CutsFiles)
        while process.is_reading(row):
            process.step()
    process.finish()
    assert process.known == 0
    process.stop()


Tensors = dict[str, Any]


def forge(path: Path, change: Callable[[Tensors], Any], *, others: int = 0) -> None:
    """Changes a file's arrays, and perhaps its tokens; its checksum and name are right."""
    header, data = read_header_of(path, 1 << 20), path.read_bytes()
    tensors: Tensors = {
        name: RawTensor(t.dtype, t.shape, memoryview(data[t.begin : t.end]))
        for name, t in header.tensors.items()
        if name not in (CHECKSUM, TOKENS)
    }
    own = header.tensors[TOKENS]
    ids = np.frombuffer(data[own.begin : own.end], np.uint32) + np.uint32(others)
    change(tensors)
    path.write_bytes(b"".join(written(encoded(file_of(path), ids, "m", tensors))))


def replaced(dtype: str, shape: tuple[int, ...]) -> Callable[[Tensors], None]:
    def replace(tensors: Tensors) -> None:
        tensors[next(iter(tensors))] = RawTensor(
            dtype, shape, memoryview(bytes(4 * int(np.prod(shape))))
        )

    return replace


def wrong_dtype(tensors: Tensors) -> None:
    name, old = next(iter(tensors.items()))
    tensors[name] = RawTensor("I32", old.shape, old.data)


def resized(tokens: int, layer: str = "") -> Callable[[Tensors], None]:
    """The arrays have so many tokens, also where there is a window or a state of no tokens."""

    def resize(tensors: Tensors) -> None:
        for name, old in [each for each in tensors.items() if each[0].startswith(layer)]:
            shape = (*old.shape[:2], tokens, *old.shape[3:])
            tensors[name] = RawTensor(old.dtype, shape, memoryview(bytes(4 * int(np.prod(shape)))))

    return resize


FORGED: dict[str, Callable[[Tensors], Any]] = {
    "another type": wrong_dtype,
    "fewer tokens": resized(1),
    "more tokens": resized(1000),
    "fewer in one layer": resized(1, "0."),
    "more in one layer": resized(1000, "0."),
    "flat": replaced("F32", (7,)),
    "another layer": lambda tensors: tensors.update({"99.keys": tensors.pop(next(iter(tensors)))}),
    "none": lambda tensors: tensors.clear(),
    "a name of Python's": lambda t: t.update({"0.__class__": t.pop(next(iter(t)))}),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", FORGED)
def test_forged_arrays(saved: Saved, tmp_path: Path, change: str) -> None:
    for path in saved.copied(tmp_path / "d"):
        forge(path, FORGED[change])
    assert saved.asked(tmp_path / "d") == 0


def test_contents_of_another_prompt(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a name that says nothing of it, or with a right checksum."""
    paths = saved.copied(tmp_path / "swapped")
    bodies = [path.read_bytes() for path in paths]
    for path, body in zip(paths, [*bodies[1:], bodies[0]], strict=True):
        path.write_bytes(body)
    assert saved.asked(tmp_path / "swapped") == 0
    for path in saved.copied(tmp_path / "forged"):
        forge(path, lambda tensors: None, others=1)
    assert saved.asked(tmp_path / "forged") == 0
    assert "other tokens than its name says" in caplog.text


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
    "no room": (prompt_files, "write_all", half_written(errno.ENOSPC)),
    "a bad disk": (prompt_files, "write_all", half_written(errno.EIO)),
    "read-only": (os, "open", open_of(DRAFT, errno.EROFS)),
    "not renamed": (os, "replace", raising(errno.ENOSPC)),
    "unmounted": (shutil, "disk_usage", raising(errno.ENOENT)),
}


@pytest.mark.parametrize("why", WRITES)
def test_a_disk_that_takes_nothing_until_it_does(
    saved: Saved,
    tmp_path: Path,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(saved.path, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(*WRITES[why])
        assert process.answer(PROMPT) == saved.answer
        process.answer(OTHER)
        process.write()
    assert caplog.text.count("can't be written to disk") == 1
    assert files(tmp_path) == [], "no part of a file is left"
    assert process.folder
    assert process.folder.nbytes == process.folder.count == 0
    now = time.monotonic() + disk_tier.PAUSE_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: now)
    process.forget_memory()
    assert process.answer(PROMPT) == saved.answer
    process.stop()
    assert len(files(tmp_path)) >= 200 // BLOCK + 1


READS: dict[str, tuple[int, bool]] = {
    "not allowed": (errno.EACCES, False),
    "a bad disk": (errno.EIO, False),
    "unmounted": (errno.ESTALE, False),
    "no descriptor": (errno.EMFILE, True),
    "no memory": (errno.ENOMEM, True),
}
"""The system's errors, and whether the files are kept: something else is short then."""


@pytest.mark.parametrize("why", READS)
def test_files_that_cant_be_read(
    saved: Saved, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.copied(tmp_path / "d")
    code, are_kept = READS[why]
    process = Process(saved.path, tmp_path / "d")
    row = process.begin(PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_of(".safetensors", code))
        while process.is_reading(row):
            process.step()
    assert (files(tmp_path / "d") == before) == are_kept
    process.finish()
    assert process.known == 0
    process.stop()
    assert saved.asked(tmp_path / "d") == 199, "they are there, or were written again"


def test_a_folder_may_be_a_link_and_its_lock_may_not(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    process = Process(saved.path, tmp_path / "link")
    process.answer(PROMPT)
    process.stop()
    assert files(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / LOCK).unlink()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "elsewhere" / LOCK).symlink_to(tmp_path / "mine")
    assert disk_tier.opened(tmp_path / "link", 1 << 30, 1 << 30) is None
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_folder_that_cant_be_had_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert disk_tier.opened(tmp_path / "file" / "folder", 1 << 30, 1 << 30) is None
    assert "can't be used" in caplog.text


def test_a_clock_that_was_set_back_turns_no_order_around(saved: Saved, tmp_path: Path) -> None:
    """The files are of tomorrow. What is used later is kept longer all the same, also after a
    restart."""
    paths = saved.copied(tmp_path / "d")
    tomorrow = time.time_ns() + 24 * 3600 * 10**9
    for at, path in enumerate(paths):
        os.utime(path, ns=(tomorrow + at, tomorrow + at))
    most = 2 * sum(path.stat().st_blocks * 512 for path in paths)
    for seeds in (range(10, 13), range(13, 16)):
        process = Process(saved.path, tmp_path / "d", most)
        for seed in seeds:
            process.answer(words(seed, 200))
            process.write()
        process.stop()
    after = Process(saved.path, tmp_path / "d", most)
    known = []
    for prompt in (words(15, 200), words(14, 200), PROMPT):
        after.answer(prompt)
        known.append(after.known)
    after.stop()
    assert known == [199, 199, 0]


MISSES = ["FORMAT", "mlx", "mlx-lm", "weights", "bits"]


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
@pytest.mark.parametrize("what", MISSES)
def test_files_of_another_version_or_model_are_not_used_and_stay(
    saved: Saved, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, path = saved.copied(tmp_path / "d"), saved.path
    if what == "FORMAT":
        monkeypatch.setattr(disk_tier, "FORMAT", "0")
    elif what == "weights":
        path = shutil.copytree(saved.path, tmp_path / "model")
        weights = bytearray((path / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (path / "model.safetensors").write_bytes(weights)
    else:
        monkeypatch.setattr(
            disk_tier, "version", lambda each: "0.0.1" if each == what else version(each)
        )
    process = Process(path, tmp_path / "d", kv_bits=8 if what == "bits" else None)
    process.answer(PROMPT)
    assert process.known == 0
    process.stop()
    assert set(before) < set(files(tmp_path / "d"))
