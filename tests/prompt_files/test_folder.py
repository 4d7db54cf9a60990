"""The folder's limits, its order of use, and what else may be in it."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server import limits
from mlx_server.prompt_files import folder as folders
from mlx_server.prompt_files.contents import DamagedFile, encoded, read
from mlx_server.prompt_files.folder import FolderInUse, PromptFolder
from mlx_server.prompt_files.names import (
    Ids,
    PromptFile,
    block_file,
    group_of,
    links_of,
    state_file,
)
from tests.prompt_files.named import BLOCK, GROUP, ids


def made(path: Path, most: int = 1 << 20) -> PromptFolder:
    folder = PromptFolder(path, most, BLOCK)
    folder.open()
    return folder


def put(folder: PromptFolder, file: PromptFile, size: int = 10) -> None:
    body = memoryview(bytes(size))
    folder.write(file, [*encoded(file, ids(1), {}, {}), body])


def on_disk(path: Path) -> int:
    return sum(e.stat().st_blocks * 512 for e in path.iterdir() if e.name != "lock")


def test_the_longest_prefix(tmp_path: Path) -> None:
    folder, tokens = made(tmp_path), ids(*range(11))
    links = links_of(tokens, BLOCK)

    def longest(asked: Ids, *, blocks: bool = True, states: bool = False) -> int:
        found = folder.longest(GROUP, asked, links_of(asked, BLOCK), blocks=blocks, states=states)
        return found.length if found else 0

    assert longest(tokens) == 0
    put(folder, block_file(GROUP, links, 1, BLOCK))
    assert longest(tokens) == 0, "its beginning is missing"
    put(folder, block_file(GROUP, links, 0, BLOCK))
    assert longest(tokens) == 8
    assert longest(tokens, states=True) == 0
    put(folder, state_file(GROUP, links, tokens, 6, BLOCK))
    assert longest(tokens, states=True) == 6
    put(folder, state_file(GROUP, links, tokens, 10, BLOCK))
    assert longest(tokens, states=True) == longest(tokens) == 10
    assert longest(ids(*range(10), 99)) == 10
    partly = folder.longest(GROUP, ids(*range(9), 99), links[:3], blocks=True, states=False)
    assert partly
    assert (partly.length, partly.most) == (8, 10), "its last token is known when it is read"
    assert longest(ids(*range(9), 99), states=True) == 6
    assert longest(ids(99, *range(1, 11))) == 0
    folder.remove(block_file(GROUP, links, 0, BLOCK))
    assert longest(tokens, states=True) == 0
    assert longest(tokens, blocks=False, states=True) == 10, "a model without such layers"


def test_a_prompt_that_parts_within_a_block_finds_it(tmp_path: Path) -> None:
    folder, tokens = made(tmp_path), ids(*range(12))
    links = links_of(tokens, BLOCK)
    blocks = [block_file(GROUP, links, at, BLOCK) for at in range(3)]
    for block in blocks:
        put(folder, block)
    asked = ids(*range(6), 99)

    def found() -> list[PromptFile]:
        seen = folder.longest(GROUP, asked, links_of(asked, BLOCK), blocks=True, states=False)
        return [*seen.files] if seen else []

    assert found() == blocks[:1], "the names alone do not say what follows"
    folder.note(GROUP, tokens, links)
    assert found() == blocks[:2]
    folder.remove(blocks[1])
    assert found() == blocks[:1]


def test_it_is_the_owners_only(tmp_path: Path) -> None:
    folder = made(tmp_path / "prompts")
    file = PromptFile(GROUP, GROUP, 4)
    put(folder, file)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.place(file).stat().st_mode) == 0o600


def test_the_least_recently_used_are_removed_and_last_blocks_first(tmp_path: Path) -> None:
    folder = made(tmp_path, 10 * 4096)
    files = [PromptFile(GROUP, group_of(str(n)), 4) for n in range(12)]
    for file in files[:9]:
        put(folder, file)
    folder.touch(files[3:6])
    for file in files[9:12]:
        put(folder, file)
    assert files[0] not in folder
    assert files[3] in folder
    assert files[11] in folder
    folder.touch(files[6:12])
    order = sorted(files[6:12], key=lambda file: folder._files[file].used)
    assert order == files[11:5:-1]
    folder.close()
    again = made(tmp_path, 10 * 4096)
    assert sorted(files[6:12], key=lambda file: again._files[file].used) == order


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30_000)), max_size=60))
def test_the_limit_holds_as_the_disk_counts(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int]]
) -> None:
    path, most = tmp_path_factory.mktemp("folder"), 20 * 4096
    folder = made(path, most)
    for number, size in writes:
        put(folder, PromptFile(GROUP, group_of(str(number)), 4), size)
        assert on_disk(path) <= most
        assert folder.nbytes == on_disk(path)
    folder.close()


def test_a_lowered_limit_holds_from_the_start(tmp_path: Path) -> None:
    folder = made(tmp_path)
    for number in range(20):
        put(folder, PromptFile(GROUP, group_of(str(number)), 4))
    folder.close()
    made(tmp_path, 5 * 4096)
    assert on_disk(tmp_path) <= 5 * 4096


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROMPT_FILES", 20)
    folder = made(tmp_path)
    for number in range(50):
        put(folder, PromptFile(GROUP, group_of(str(number)), 4))
        assert folder.count <= 20
    assert folder.count >= 18


def test_a_folder_has_one_engine(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with pytest.raises(FolderInUse):
        made(tmp_path)
    folder.close()
    made(tmp_path).close()


def test_what_is_not_ours_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = PromptFile(GROUP, GROUP, 4)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / file.name).symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / PromptFile(GROUP, GROUP, 8).name)
    folder = made(tmp_path, 4096 * 3)
    assert folder.count == 0
    assert "4 entries of other programs" in caplog.text
    put(folder, file)
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert (tmp_path / file.name).is_file()


def test_drafts_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "novel.draft", tmp_path / f"{'0a' * 8}.draft"
    for draft in (theirs, ours):
        draft.write_text("Call me Ishmael.")
    made(tmp_path)
    assert theirs.exists()
    assert not ours.exists()


def test_files_of_another_user_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who knows a prompt could have made them."""
    folder = made(tmp_path)
    file = PromptFile(GROUP, GROUP, 4)
    folder.write(file, encoded(file, ids(1), {}, {}))
    assert read(folder.place(file), file, 1 << 20)
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(DamagedFile, match="of this user"):
        read(folder.place(file), file, 1 << 20)
    folder.scan()
    assert file not in folder
    assert folder.place(file).exists()


def test_a_disk_that_is_nearly_full_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path)
    monkeypatch.setattr(folders, "RESERVE_BYTES", 1 << 62)
    with pytest.raises(OSError, match="left free"):
        put(folder, PromptFile(GROUP, GROUP, 4))
    assert on_disk(tmp_path) == 0


def test_files_that_the_owner_removed_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = made(tmp_path), PromptFile(GROUP, GROUP, 4)
    put(folder, file)
    folder.place(file).unlink()
    monkeypatch.setattr(folders, "SCAN_SECONDS", 0.0)
    put(folder, file)
    assert folder.place(file).exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_server.prompt_files import folder as folders
from mlx_server.prompt_files.names import PromptFile, group_of

def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def half_written(opened, part):
    opened.write(part[: len(part) // 2])
    killed()

folder = folders.PromptFolder(Path(sys.argv[1]), 1 << 30)
folder.open()
for number in range(6):
    if number == 5 and sys.argv[2] == "half written":
        folders._write_all = half_written
    elif number == 5:
        os.replace = killed
    folder.write(PromptFile(group_of("m"), group_of(str(number)), 4), [memoryview(bytes(300_000))])
"""


@pytest.mark.parametrize("when", ["half written", "not yet renamed"])
def test_a_kill_while_writing_loses_that_file_alone(tmp_path: Path, when: str) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(f"*{folders.DRAFT}"))) == 1
    folder = made(tmp_path, 1 << 30)
    assert all(PromptFile(group_of("m"), group_of(str(n)), 4) in folder for n in range(5))
    names = {entry.name for entry in tmp_path.iterdir()} - {folders.LOCK}
    assert len(names) == folder.count == 5, "each file is whole, and no draft is left"
    sizes = {(tmp_path / name).stat().st_size for name in names}
    assert sizes == {300_032}
