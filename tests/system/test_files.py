"""A file is not written through a link that another user may have made, nor is a secret key."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_server.cli import app
from mlx_server.clients.connect import ClientFile, ClientRecord, Connection, changes, write
from mlx_server.errors import SettingsError
from mlx_server.http.security import KEY_BYTES, KEY_FILE, secret_key
from mlx_server.prompt_files import PromptFolder
from mlx_server.store.file import StoreFile
from mlx_server.system import logs, service
from mlx_server.system.files import MOST_BYTES, not_linked, open_regular, own_path, read_regular
from mlx_server.system.servers import FOLDER, Servers

OTHER = 54321
Give = Callable[[Path], None]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Makes a file or a link another user's."""
    if not os.geteuid():
        return lambda path: os.chown(path, OTHER, -1, follow_symlinks=False)
    user = os.geteuid()
    return lambda path: monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def test_own_links_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "absolute").symlink_to(folder)
    (folder / "relative").symlink_to("../absolute/./missing")
    assert own_path(tmp_path / "absolute" / "relative") == folder.resolve() / "missing"
    assert own_path(folder / "new") == folder.resolve() / "new"


@pytest.mark.parametrize("target", ["victim", "missing"])
@pytest.mark.parametrize("place", ["file", "folder"])
def test_links_of_others_are_not(target: str, place: str, tmp_path: Path, give: Give) -> None:
    (tmp_path / "victim").write_text("as before")
    link = tmp_path / "link"
    link.symlink_to(target if place == "file" else ".")
    give(link)
    with pytest.raises(PermissionError, match="another user may have made"):
        own_path(link if place == "file" else link / target)


@pytest.mark.parametrize("whose", ["another user's", "everybody's"])
def test_a_link_in_a_folder_that_is_not_ours(whose: str, tmp_path: Path, give: Give) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "victim")
    if whose == "everybody's":
        folder.chmod(0o777)
    else:
        give(folder)
    with pytest.raises(PermissionError):
        own_path(folder / "link")


def _connect(path: Path) -> None:
    record = ClientRecord("a client", (ClientFile(str(path), "json", {"a": 1}),), ("a",))
    list(write(changes(record, Connection("http://127.0.0.1:8000", "none", "m", 4096))))


def _install(path: Path) -> None:
    service.install([], lambda command: subprocess.CompletedProcess([*command], 0, "", ""))


def _record(path: Path) -> None:
    line = ["replay", "record", "m", "--requests", __file__, "--output", str(path)]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    raise PermissionError(result.stderr)


def _store(path: Path) -> None:
    StoreFile(path, Servers(path.parent)).open()


def _servers(path: Path) -> None:
    path.rename(path.with_name(FOLDER))
    Servers(path.parent).join()


def _prompts(path: Path) -> None:
    PromptFolder(path, 1 << 30).open()


@pytest.mark.parametrize(
    "writes", [_prompts, _store, _servers, _connect, _install, _record, logs.write_to]
)
def test_no_command_writes_where_another_user_points(
    writes: Callable[[Path], None], tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    link = tmp_path / "file"
    if writes is _install:
        link = service.system().file
        link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "victim")
    give(link)
    with pytest.raises((SettingsError, PermissionError), match="another user may have made"):
        writes(link)
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("target", ["victim", "missing"])
def test_a_lock_is_not_made_where_another_user_points(
    target: str, tmp_path: Path, give: Give
) -> None:
    (tmp_path / "victim").write_text("as before")
    link = tmp_path / "responses.db.lock"
    link.symlink_to(target)
    give(link)
    with pytest.raises(PermissionError, match="another user may have made"):
        StoreFile(tmp_path / "responses.db", Servers(tmp_path)).open()
    assert not (tmp_path / "missing").exists()


def test_a_service_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has the old one open, or has made another link to it, has the old one."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    _install(tmp_path)
    file, other = service.system().file, tmp_path / "other"
    other.hardlink_to(file)
    file.chmod(0o666)
    before = other.read_text()
    inactive = service.system().status
    service.install(
        ["--port", "1"],
        lambda command: subprocess.CompletedProcess([*command], command == inactive, "", ""),
    )
    assert other.read_text() == before != file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_link_that_appears_after_the_check_is_not_opened(tmp_path: Path) -> None:
    link = tmp_path / "link"
    path = own_path(link)
    link.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"[Ss]ymbolic links"), open(path, "a", opener=not_linked):
        pass
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("planted", ["link", "file", "pipe"])
def test_a_key_that_another_user_planted_is_not_used(
    planted: str, tmp_path: Path, give: Give, caplog: pytest.LogCaptureFixture
) -> None:
    path, known = tmp_path / KEY_FILE, bytes(KEY_BYTES)
    if planted == "link":
        (tmp_path / "known").write_bytes(known)
        path.symlink_to("known")
    elif planted == "file":
        path.write_bytes(known)
    else:
        os.mkfifo(path)
    give(path)
    assert known != secret_key(tmp_path) != secret_key(tmp_path)
    assert "can't be used" in caplog.text


def test_a_log_is_not_rotated_into_a_link(tmp_path: Path) -> None:
    """Which somebody makes at the moment in which the old log has been renamed."""
    code = """
import os, sys
from logging import handlers
from mlx_server.system import logs
rotate = handlers.RotatingFileHandler.rotate
def rotate_and_link(self, source, target):
    rotate(self, source, target)
    os.symlink(sys.argv[2], source)
handlers.RotatingFileHandler.rotate = rotate_and_link
from pathlib import Path
logs.write_to(Path(sys.argv[1]), rotate_bytes=100)
for _ in range(5):
    print("x" * 60, flush=True)
"""
    files = [tmp_path / "server.log", tmp_path / "victim"]
    subprocess.run([sys.executable, "-c", code, *map(str, files)], check=False, timeout=60)
    assert (tmp_path / "server.log.1").exists()
    assert not (tmp_path / "victim").exists()


def test_a_file_with_a_hole_is_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.truncate(file, MOST_BYTES)
    assert len(read_regular(file)) == MOST_BYTES
    os.truncate(file, 1 << 40)
    with pytest.raises(OSError, match="larger than 67,108,864 bytes"):
        read_regular(file)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a pipe"])
def test_what_is_no_file_is_not_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    os.mkfifo(tmp_path / "pipe")
    match kind:
        case "pipe":
            path = tmp_path / "pipe"
        case "device":
            path = Path("/dev/zero")
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to(tmp_path / "pipe")
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="not a file"):
        open_regular(path)
    assert len(os.listdir("/dev/fd")) == before


def test_a_key_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "server"
    key = secret_key(folder)
    assert len(key) == KEY_BYTES
    assert secret_key(folder) == key
    assert [each.name for each in folder.iterdir()] == [KEY_FILE]
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_servers_that_start_at_once_have_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(secret_key, [tmp_path / "data"] * 40))
    assert len(keys) == 1


def test_without_a_folder_each_server_has_its_own() -> None:
    assert secret_key(None) != secret_key(None)


def test_a_damaged_key_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / KEY_FILE).write_bytes(b"short")
    with caplog.at_level(logging.WARNING):
        assert secret_key(tmp_path) != secret_key(tmp_path)
    assert "damaged" in caplog.text
    assert (tmp_path / KEY_FILE).read_bytes() == b"short"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert len(secret_key(tmp_path)) == KEY_BYTES
