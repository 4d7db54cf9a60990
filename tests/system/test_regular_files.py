"""Only files are opened: a pipe or a device would keep its reader waiting."""

import os
from pathlib import Path

import pytest

from mlx_server.system.files import open_regular, read_regular


def test_a_file_is_read_as_bytes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes("é\r\nb\r".encode())
    assert read_regular(file) == "é\r\nb\r".encode()


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
