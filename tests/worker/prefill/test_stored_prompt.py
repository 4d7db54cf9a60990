"""Damaged and forged files are misses: the answer is a cold engine's, and the log has a line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_server.models.weights_files import read_header_of
from mlx_server.prompt_files.contents import CHECKSUM, TOKENS, RawTensor, encoded, written
from mlx_server.prompt_files.names import parsed
from mlx_server.worker.prefill import disk_tier
from tests.worker.kinds import KINDS
from tests.worker.prefill.disk_runs import Process, words

pytestmark = pytest.mark.slow

PROMPT = words(1, 200)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "IDLE_SECONDS", 0.0)


class Saved:
    """A prompt on disk, and the answer of an engine that never saw it."""

    def __init__(self, kind: str, folder: Path) -> None:
        (found,) = [each for each in KINDS if each.name == kind]
        self.path = found.save(folder / "model")
        self.folder = folder / "disk"
        process = Process(self.path, self.folder)
        self.answer = process.answer(PROMPT, branches=[70, 150])
        process.stop()

    def copied(self, folder: Path) -> list[Path]:
        shutil.copytree(self.folder, folder)
        return sorted(each for each in folder.iterdir() if each.name != "lock")

    def check(self, folder: Path) -> int:
        """Asks again. Returns how many tokens were known."""
        process = Process(self.path, folder)
        assert process.answer(PROMPT) == self.answer
        cached = process.cached
        process.stop()
        return cached


@pytest.fixture(scope="module", params=["llama", "gpt-oss", "lfm2", "mamba2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk_tier, "IDLE_SECONDS", 0.0)
        return Saved(request.param, tmp_path_factory.mktemp(request.param))


def test_all_of_it_is_found_if_nothing_is_damaged(saved: Saved, tmp_path: Path) -> None:
    saved.copied(tmp_path / "d")
    assert saved.check(tmp_path / "d") >= 150


REGIONS: dict[str, Callable[[int], int]] = {
    "length of the header": lambda size: 0,
    "header": lambda size: 40,
    "end of the header": lambda size: 500,
    "arrays": lambda size: size // 2,
    "tokens": lambda size: size - 32 - 4,
    "checksum": lambda size: size - 1,
}


@pytest.mark.parametrize("saved", ["gpt-oss", "mamba2"], indirect=True)
@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_bit(
    saved: Saved, tmp_path: Path, region: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = saved.copied(tmp_path / "d")
    for path in files:
        whole = bytearray(path.read_bytes())
        whole[REGIONS[region](len(whole))] ^= 4
        path.write_bytes(whole)
    assert saved.check(tmp_path / "d") == 0
    lines = [line for line in caplog.messages if "was removed" in line]
    assert 1 <= len(lines) <= len(files)


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "nothing", "giant"])
def test_what_took_a_files_place(
    saved: Saved, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the engine starts, and after it has looked at the folder."""
    files = saved.copied(tmp_path / "d")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(files[0].read_bytes())

    def replace() -> None:
        for path in files:
            path.unlink()
            match what:
                case "link":
                    path.symlink_to(elsewhere)
                case "pipe":
                    os.mkfifo(path)
                case "folder":
                    path.mkdir()
                case "nothing":
                    path.write_bytes(b"")
                case "giant":
                    with path.open("wb") as file:
                        file.truncate(1 << 40)

    later = Process(saved.path, tmp_path / "d")
    replace()
    assert later.answer(PROMPT) == saved.answer
    assert later.cached == 0
    later.stop()
    assert elsewhere.exists()


Tensors = dict[str, Any]


def forge(path: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> None:
    """Changes a file's arrays and numbers; its checksum, name and tokens are right."""
    file = parsed(path.name)
    assert file
    header = read_header_of(path, 1 << 20)
    data = path.read_bytes()
    tensors: Tensors = {
        name: RawTensor(t.dtype, t.shape, memoryview(data[t.begin : t.end]))
        for name, t in header.tensors.items()
        if name not in (CHECKSUM, TOKENS)
    }
    own = header.tensors[TOKENS]
    ids = np.frombuffer(data[own.begin : own.end], np.uint32)
    about = json.loads(str(header.metadata["about"]))
    change(tensors, about)
    path.write_bytes(b"".join(written(encoded(file, ids, about, tensors))))


def _first(tensors: Tensors) -> str:
    return next(iter(tensors))


def _replaced(tensors: Tensors, dtype: str, shape: tuple[int, ...], size: int) -> None:
    tensors[_first(tensors)] = RawTensor(dtype, shape, memoryview(bytes(size)))


def wrong_dtype(tensors: Tensors, about: dict[str, Any]) -> None:
    old = tensors[_first(tensors)]
    tensors[_first(tensors)] = RawTensor("I32", old.shape, old.data)


def fewer_tokens(tensors: Tensors, about: dict[str, Any]) -> None:
    for name, old in list(tensors.items()):
        shape = (*old.shape[:2], 1, *old.shape[3:])
        tensors[name] = RawTensor(old.dtype, shape, memoryview(bytes(4 * int(np.prod(shape)))))


def flat(tensors: Tensors, about: dict[str, Any]) -> None:
    _replaced(tensors, "F32", (7,), 28)


def other_layers(tensors: Tensors, about: dict[str, Any]) -> None:
    tensors["99.keys"] = tensors.pop(_first(tensors))


def none(tensors: Tensors, about: dict[str, Any]) -> None:
    tensors.clear()


def other_names(tensors: Tensors, about: dict[str, Any]) -> None:
    tensors["0.__class__"] = tensors.pop(_first(tensors))


@pytest.mark.parametrize(
    "change", [wrong_dtype, fewer_tokens, flat, other_layers, none, other_names]
)
def test_forged_arrays(saved: Saved, tmp_path: Path, change: Any) -> None:
    for path in saved.copied(tmp_path / "d"):
        forge(path, change)
    assert saved.check(tmp_path / "d") == 0


@pytest.mark.parametrize(
    "numbers",
    [
        None,
        [],
        {"0": [1]},
        {"0": ["ArraysCache"]},
        lambda own: [*own, 1],
        lambda own: [n + 1 for n in own] or [0],
        lambda own: [10**9] * len(own) or [0],
        lambda own: [str(n) for n in own] or {},
        lambda own: [True] * len(own) or "x",
    ],
    ids=["null", "list", "one", "class", "more", "others", "huge", "texts", "booleans"],
)
@pytest.mark.parametrize("kind", ["gpt-oss", "lfm2"])
def test_forged_numbers(tmp_path: Path, numbers: Any, kind: str) -> None:
    saved = Saved(kind, tmp_path)

    def change(tensors: Tensors, about: dict[str, Any]) -> None:
        if callable(numbers):
            about["rest"] = {layer: numbers(own) for layer, own in about["rest"].items()}
        else:
            about["rest"] = numbers

    for path in saved.copied(tmp_path / "d"):
        file = parsed(path.name)
        if file and file.tail:
            forge(path, change)
    assert saved.check(tmp_path / "d") == 0
