"""What is written is read again, and nothing else is."""

import json
import os
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from mlx_server.prompt_files import contents
from mlx_server.prompt_files.contents import (
    DamagedFile,
    RawTensor,
    encoded,
    model_in,
    read,
    written,
)
from mlx_server.prompt_files.names import PromptFile, block_file, links_of

IDS = np.arange(8, dtype=np.uint32)
FILE = block_file("0" * 32, links_of(IDS, 8), 0, 8)
ABOUT = {"model": "m", "rest": {}}
KEYS = np.arange(24, dtype=np.uint16).reshape(1, 2, 3, 4)
MOST = 1 << 20


def saved(folder: Path, file: PromptFile = FILE) -> Path:
    tensors = {"0.keys": RawTensor("BF16", KEYS.shape, memoryview(KEYS.tobytes()))}
    path = folder / file.name
    path.write_bytes(b"".join(written(encoded(file, IDS, ABOUT, tensors))))
    return path


def test_it_is_a_safetensors_file_that_is_read_again(tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = read(path, FILE, MOST)
    assert found.about == ABOUT
    assert np.array_equal(found.ids, IDS)
    dtype, items = found.tensors["0.keys"]
    assert dtype == "BF16"
    assert np.array_equal(items, KEYS)
    assert model_in(path) == "m"
    with safe_open(path, "numpy") as opened:
        assert set(opened.keys()) == {"0.keys", "tokens", "checksum"}


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(DamagedFile):
            read(path, FILE, MOST)


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(DamagedFile):
            read(path, FILE, MOST)


def test_a_file_with_another_name(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = PromptFile("1" * 32, FILE.link, FILE.length)
    with pytest.raises(DamagedFile, match="not the file"):
        read(path, other, MOST)


def forged(path: Path, header: Any, data: bytes = b"") -> None:
    """A file with a right checksum."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<Q", len(text)) + text + data
    path.write_bytes(body + sha256(body).digest())


META = {"file": FILE.name, "about": "{}"}
SUM = {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}


def tokens_tensor(dtype: str, size: int, end: int) -> Any:
    own = {"dtype": dtype, "shape": [size], "data_offsets": [0, end]}
    return {"__metadata__": META, "tokens": own}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[" * 100_000,
        b"[]",
        {},
        {"__metadata__": META},
        {"__metadata__": META, "checksum": SUM},
        {"__metadata__": {**META, "about": "[1]"}, "checksum": SUM},
        tokens_tensor("U32", 8, 1),
        {
            "__metadata__": META,
            "tokens": {"dtype": "U32", "shape": [1 << 60], "data_offsets": [0, 4]},
        },
        tokens_tensor("C64", 4, 32),
        {
            "__metadata__": META,
            "tokens": {"dtype": "pickle", "shape": [8], "data_offsets": [0, 32]},
        },
        {"__metadata__": META, "../../etc/passwd": SUM},
    ],
    ids=lambda header: str(header)[-60:],
)
def test_forged_headers(tmp_path: Path, header: Any) -> None:
    forged(tmp_path / FILE.name, header)
    with pytest.raises(DamagedFile):
        read(tmp_path / FILE.name, FILE, MOST)


def test_a_header_of_many_bytes_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "HEADER_BYTES", 64)
    saved(tmp_path)
    with pytest.raises(DamagedFile, match="the limit is 64"):
        read(tmp_path / FILE.name, FILE, MOST)


def test_a_file_larger_than_expected_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / FILE.name
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(DamagedFile, match="bytes"):
        read(path, FILE, MOST)


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    elsewhere = saved(tmp_path).rename(tmp_path / "elsewhere")
    path = tmp_path / FILE.name
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"):
        read(path, FILE, MOST)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedFile, match="not a regular file"):
        read(path, FILE, MOST)
