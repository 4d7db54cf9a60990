import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_server.http.security import KEY_BYTES, KEY_FILE, secret_key


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
