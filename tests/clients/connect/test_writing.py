import os
from pathlib import Path

import pytest

from mlx_server.clients.connect.clients import ClientFile, ClientRecord
from mlx_server.clients.connect.template import Connection
from mlx_server.clients.connect.writing import changes, write
from mlx_server.errors import SettingsError

HERE = Connection("http://127.0.0.1:8000", "none", "m", 4096)


def record(path: Path) -> ClientRecord:
    return ClientRecord("a client", (ClientFile(str(path), "json", {"model": "{model}"}),), ("a",))


def test_each_backup_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for number in range(3):
        path.write_text(f'{{"own": {number}}}')
        list(write(changes(record(path), HERE)))
    names = ("x.json.backup", "x.json.backup-1", "x.json.backup-2")
    assert [(tmp_path / name).read_text() for name in names] == [
        f'{{"own": {i}}}' for i in range(3)
    ]


def test_a_link_stays_a_link_and_a_mode_stays_too(tmp_path: Path) -> None:
    file, link = tmp_path / "real.json", tmp_path / "x.json"
    file.write_text("{}")
    file.chmod(0o640)
    link.symlink_to(file)
    list(write(changes(record(link), HERE)))
    assert link.is_symlink()
    assert '"m"' in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_file_that_can_not_be_added_to_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("// mine\n{}")
    with pytest.raises(SettingsError, match=r"without losing something[\s\S]*Add this[\s\S]*\"m\""):
        changes(record(path), HERE)
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_a_backup_has_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'{"own":\r\n1}')
    list(write(changes(record(path), HERE)))
    assert (tmp_path / "x.json.backup").read_bytes() == b'{"own":\r\n1}'


def test_what_its_owner_writes_meanwhile_is_kept(tmp_path: Path) -> None:
    """As clients do that are running."""
    path = tmp_path / "x.json"
    for before in ('{"own": 1}', None):
        path.unlink(missing_ok=True)
        if before:
            path.write_text(before)
        found = changes(record(path), HERE)
        path.write_text('{"own": 2}')
        with pytest.raises(SettingsError, match=r"can't be written.*changed meanwhile"):
            list(write(found))
        assert path.read_text() == '{"own": 2}'
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_could_not_be_written_again_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(r'{"own": "\ud800"}')
    with pytest.raises(SettingsError, match="surrogate"):
        changes(record(path), HERE)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SettingsError, match="can't be read"):
        changes(record(path), HERE)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match=r"x\.json can't be read"):
        changes(record(path), HERE)
    with pytest.raises(SettingsError, match="can't be read"):
        changes(record(tmp_path), HERE)
