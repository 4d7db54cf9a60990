"""The prompt cache's files: their names, their contents and their folder."""

import fcntl
import json
import os
import signal
import stat
import struct
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mlx_server import limits, prompt_files
from mlx_server.prompt_files import (
    DRAFT,
    LOCK,
    DamagedFile,
    Ids,
    PromptFile,
    PromptFolder,
    RawTensor,
    encoded,
    group_of,
    model_in,
    read,
    written,
)
from mlx_server.system import daily_bytes
from mlx_server.system.daily_bytes import DailyBytes

BLOCK = 4
GROUP = group_of("m")
FILE = PromptFile(GROUP, GROUP, 8)
MOST = 1 << 20


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.uint32)


def numbered(number: int) -> PromptFile:
    return PromptFile(GROUP, group_of(str(number)), 4)


TENSORS = {
    "0.keys": RawTensor("BF16", (2, 3), memoryview(bytes(range(12)))),
    "1.state": RawTensor("F32", (0,), memoryview(b"")),
}


def saved(folder: Path) -> Path:
    pieces = encoded(FILE, ids(*range(8)), "qwen3", TENSORS)
    path = folder / FILE.name
    path.write_bytes(b"".join(written(pieces)))
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = saved(tmp_path)
    tensors, tokens = read(path, FILE, MOST)
    assert tokens.tolist() == list(range(8))
    assert {name: (dtype, items.shape) for name, (dtype, items) in tensors.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()
    }
    assert tensors["0.keys"][1].tobytes() == bytes(range(12))
    assert model_in(path) == "qwen3"
    with safe_open(path, "numpy") as opened:
        assert {*opened.keys()} == {*TENSORS, "tokens", "checksum"}
    with pytest.raises(DamagedFile, match="not the file that its name says"):
        read(path, PromptFile(GROUP, GROUP, 12), MOST)
    with pytest.raises(DamagedFile, match="bytes"):
        read(path, FILE, path.stat().st_size - 1)


def test_no_byte_can_be_changed_or_be_missing(tmp_path: Path) -> None:
    whole = saved(tmp_path).read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(whole))]
    for body in (*damaged, *(whole[:size] for size in range(0, len(whole), 7))):
        (tmp_path / FILE.name).write_bytes(body)
        with pytest.raises(DamagedFile):
            read(tmp_path / FILE.name, FILE, MOST)


META = {"file": FILE.name}
SUM = {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}


def header_of(dtype: str, shape: list[int], end: int) -> Any:
    tokens = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
    return {"__metadata__": META, "tokens": tokens}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[" * 100_000,
        b"[]",
        {},
        {"__metadata__": META},
        {"__metadata__": META, "checksum": SUM},
        header_of("U32", [8], 1),
        header_of("U32", [1 << 60], 4),
        header_of("U32", [2, 4], 32),
        header_of("C64", [4], 32),
        header_of("pickle", [8], 32),
        {"__metadata__": META, "../../etc/passwd": SUM},
    ],
    ids=lambda header: str(header)[-60:],
)
def test_forged_headers_with_a_right_checksum(tmp_path: Path, header: Any) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<Q", len(text)) + text
    (tmp_path / FILE.name).write_bytes(body + sha256(body).digest())
    with pytest.raises(DamagedFile):
        read(tmp_path / FILE.name, FILE, MOST)


def test_a_header_of_many_bytes_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_files, "HEADER_BYTES", 64)
    with pytest.raises(DamagedFile, match="the limit is 64"):
        read(saved(tmp_path), FILE, MOST)


def test_links_pipes_and_files_of_other_users_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who knows a prompt could have made them."""
    elsewhere = saved(tmp_path).rename(tmp_path / "elsewhere")
    path = tmp_path / FILE.name
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"):
        read(path, FILE, MOST)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedFile, match="not a regular file"):
        read(path, FILE, MOST)
    path.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(DamagedFile, match="of this user"):
        read(saved(tmp_path), FILE, MOST)
    assert opened(tmp_path).count == 0
    assert path.exists()


def opened(path: Path, most: int = MOST) -> PromptFolder:
    folder = PromptFolder(path, most, BLOCK)
    folder.open()
    return folder


def put(folder: PromptFolder, file: PromptFile, size: int = 10) -> None:
    folder.write(file, [*encoded(file, ids(1), "", {}), memoryview(bytes(size))])


OTHERS = {LOCK, daily_bytes.FILE}


def on_disk(path: Path) -> int:
    return sum(e.stat().st_blocks * 512 for e in path.iterdir() if e.name not in OTHERS)


def test_it_is_the_owners_only(tmp_path: Path) -> None:
    folder = opened(tmp_path / "prompts")
    put(folder, FILE)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.place(FILE).stat().st_mode) == 0o600


def test_the_least_recently_used_are_removed_and_last_blocks_first(tmp_path: Path) -> None:
    folder = opened(tmp_path, 10 * 4096)
    files = [numbered(number) for number in range(12)]
    for file in files[:9]:
        put(folder, file)
    folder.touch(files[3:6])
    for file in files[9:12]:
        put(folder, file)
    assert files[0] not in folder
    assert files[3] in folder
    folder.touch(files[6:12])
    assert folder.by_use()[-6:] == files[11:5:-1]
    assert opened(tmp_path, 10 * 4096).by_use()[-6:] == files[11:5:-1]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30_000)), max_size=60))
def test_the_limit_holds_as_the_disk_counts(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int]]
) -> None:
    path, most = tmp_path_factory.mktemp("folder"), 20 * 4096
    folder = opened(path, most)
    for number, size in writes:
        put(folder, numbered(number), size)
        assert on_disk(path) <= most
        assert folder.nbytes == on_disk(path)
    opened(path, 5 * 4096)
    assert on_disk(path) <= 5 * 4096, "a lowered limit holds from the start"


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROMPT_FILES", 20)
    folder = opened(tmp_path)
    for number in range(50):
        put(folder, numbered(number))
        assert folder.count <= 20
    assert folder.count >= 18


def test_two_servers_use_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_files, "SCAN_PAUSE", 0)
    one, other = opened(tmp_path), opened(tmp_path)
    os.utime(tmp_path, (0, 0))  # longer ago than a tick of the file system's clock
    other.refresh()
    put(one, FILE)
    assert FILE not in other
    assert other.is_stale
    inode = one.place(FILE).stat().st_ino
    put(PromptFolder(tmp_path, MOST, BLOCK), FILE)
    assert one.place(FILE).stat().st_ino == inode, "it was not written again"
    other.refresh()
    assert FILE in other
    put(one, numbered(0))
    assert not one.is_stale, "its own changes are known"
    other.remove(FILE)
    put(one, FILE)
    assert one.place(FILE).exists()


def test_a_file_has_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = opened(tmp_path), opened(tmp_path)

    def written_twice(*arguments: Any) -> None:
        monkeypatch.undo()
        put(other, FILE)
        assert not other.place(FILE).exists()
        assert other.written == 0
        other.open()  # which removes what killed servers have half written
        prompt_files.write_all(*arguments)

    monkeypatch.setattr(prompt_files, "write_all", written_twice)
    put(one, FILE)
    assert one.place(FILE).exists()


def test_what_a_server_reads_is_not_removed_to_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_files, "LOCK_SECONDS", 0.0)
    one, other = opened(tmp_path, 10 * 4096), opened(tmp_path, 10 * 4096)
    files = [numbered(number) for number in range(12)]
    for file in files[:9]:
        put(one, file)
    other.refresh()
    with other.reading(), one.reading():
        for file in files[9:]:
            put(one, file)
        one.remove_unread(files)
        assert all(other.place(file).exists() for file in files[:9])
        assert on_disk(tmp_path) <= 10 * 4096
    other.touch(files[:3])
    for file in files[9:]:
        put(one, file)
    assert all(file in one for file in files[:3]), "another server's use counts"
    assert files[3] not in one


def test_what_all_servers_write_in_a_day_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (PromptFolder(tmp_path, MOST, BLOCK, writes_per_day=1600) for _ in range(2))
    one.open()
    other.open()
    put(one, numbered(0), 500)
    put(other, numbered(1), 500)
    with pytest.raises(OSError, match="`disk_writes_per_day`"):
        put(one, numbered(2), 500)
    assert not one.place(numbered(2)).exists()
    assert 1000 < DailyBytes(tmp_path, 0).today <= 1600
    monkeypatch.setattr(daily_bytes, "_day", lambda: "2999-01-01")
    put(one, numbered(2), 500)
    file = tmp_path / daily_bytes.FILE
    file.write_text("damaged")
    put(one, numbered(3), 500)
    monkeypatch.setattr(daily_bytes, "LOCK_SECONDS", 0.0)
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # by a program that never lets go
        with pytest.raises(OSError, match="`disk_writes_per_day`"):
            put(one, numbered(4), 500)
    file.unlink()
    os.mkfifo(file)
    assert DailyBytes(tmp_path, 0).today == 0


def test_what_is_not_ours_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "novel.draft").write_text("mine")
    (tmp_path / f"{numbered(1).name}{DRAFT}").write_text("half of a file")
    (tmp_path / FILE.name).symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / PromptFile(GROUP, GROUP, 12).name)
    folder = opened(tmp_path, 4096 * 3)
    assert folder.count == 0
    assert "4 entries of other programs" in caplog.text
    put(folder, FILE)
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert (tmp_path / FILE.name).is_file()
    assert [path.name for path in tmp_path.glob(f"*{DRAFT}")] == ["novel.draft"]


def test_a_disk_that_is_nearly_full_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    monkeypatch.setattr(prompt_files, "RESERVE_BYTES", 1 << 62)
    with pytest.raises(OSError, match="left free"):
        put(folder, FILE)
    assert on_disk(tmp_path) == 0


def test_files_that_the_owner_removed_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_files, "SCAN_PAUSE", 0)
    folder = opened(tmp_path)
    put(folder, FILE)
    folder.place(FILE).unlink()
    put(folder, FILE)
    assert folder.place(FILE).exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_server import prompt_files
from mlx_server.prompt_files import PromptFile, PromptFolder, group_of

def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def half_written(opened, part):
    opened.write(part[: len(part) // 2])
    killed()

folder = PromptFolder(Path(sys.argv[1]), 1 << 30)
folder.open()
for number in range(6):
    if number == 5 and sys.argv[2] == "half written":
        prompt_files.write_all = half_written
    elif number == 5:
        os.replace = killed
    folder.write(PromptFile(group_of("m"), group_of(str(number)), 4), [memoryview(bytes(300_000))])
"""


@pytest.mark.parametrize("when", ["half written", "not yet renamed"])
def test_a_kill_while_writing_loses_that_file_alone(tmp_path: Path, when: str) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(f"*{DRAFT}"))) == 1
    folder = opened(tmp_path, 1 << 30)
    assert all(numbered(number) in folder for number in range(5))
    names = {entry.name for entry in tmp_path.iterdir()} - OTHERS
    assert len(names) == folder.count == 5, "each file is whole, and no draft is left"
    assert {(tmp_path / name).stat().st_size for name in names} == {300_032}
