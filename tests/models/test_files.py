"""JSON files as people save them."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_server import limits
from mlx_server.errors import ModelUnusable
from mlx_server.models.files import (
    MOST_BYTES,
    SAMPLE_BYTES,
    SAMPLES,
    SIZES,
    BadHeader,
    Tensor,
    TensorsHeader,
    check_model,
    identity_of_model,
    is_inside,
    is_own,
    other_kind,
    other_than_weights,
    read_header,
    read_header_of,
    read_json,
    read_optional_json,
    stamp_of_model,
)
from tests.tables import cases

VALUE = {"a": "é", "b": [1, None]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_utf_8_is_read_with_and_without_a_mark(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(json.dumps(VALUE, ensure_ascii=False).encode(encoding))
    assert read_json(file) == read_optional_json(file) == VALUE


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": 1,}', "is not valid JSON: .*line 1.*Download it again"),
        (b"", "is empty. Download it again"),
        (b"[]", "must contain a JSON object. Download it again"),
        (b"<html>", "is a web page, not the file itself"),
        ("{}".encode("utf-16"), "is UTF-16 text. Save it as UTF-8"),
        (b'{"a": "\xe9"}', "is not valid JSON"),
    ],
)
def test_what_is_none_is_told_or_passed_over(
    tmp_path: Path, content: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ModelUnusable, match=rf"^x\.json {says}"):
        read_json(file)
    assert read_optional_json(file) == {}
    assert "x.json" in caplog.text
    assert "is used without this file" in caplog.text


OTHERS = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:1": "Git LFS pointer",
    b"\xef\xbb\xbfversion https://git-lfs.github.com/spec/v1": "Git LFS pointer",
    b"<!DOCTYPE html><html>": "web page",
    b"\n  <!doctype HTML>": "web page",
    b"<HTML lang=en>": "web page",
    b'<?xml version="1.0"?><Error><Code>AccessDenied': "as XML",
    b"<Error><Code>NoSuchKey</Code>": "as XML",
    b"GGUF\x03\0\0\0": "GGUF",
    b"PK\x03\x04\x14\0": "PyTorch",
    b"\x80\x02}q\0": "PyTorch",
    b"\x80\x04\x95": "PyTorch",
    b"\x1f\x8b\x08\0": "archive",
    bytes(128): "zeros",
    b"": "empty",
    b"\xef\xbb\xbf": "empty",
}
OWN = (
    b'\x58\x01\0\0\0\0\0\0{"__metadata__":{"format":"mlx"}',  # safetensors
    b"\x02\0\0\0\0\0\0\0{}",  # of no tensors
    b'{"model_type": "llama"}',
    b'\xef\xbb\xbf{\n  "version": "1.0"',
    b"[]",
    b"IQ== 0\nIg== 1\n",  # tiktoken
    b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02",  # SentencePiece
    b"{%- for message in messages -%}",
    b"<|im_start|>{{ messages }}",
    b"<s>{% if messages %}",
    b"<start_of_turn>",
    b"GGU",
)


@pytest.mark.parametrize("begin", OTHERS)
def test_another_kind_is_told(begin: bytes) -> None:
    for tell in (other_kind, other_than_weights):
        assert OTHERS[begin] in (tell(begin) or "")


@pytest.mark.parametrize("begin", OWN)
def test_a_models_file_is_none(begin: bytes) -> None:
    assert other_kind(begin) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "m"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(64 << 10))
    return made


@pytest.mark.parametrize("name", [*MOST_BYTES, "model-00002-of-00002.safetensors"])
def test_every_file_that_is_read_counts(folder: Path, name: str) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    stamps = [stamp_of_model(folder)]
    file.write_text("{}")
    stamps.append(stamp_of_model(folder))
    shutil.copy2(file, folder / "new")  # as old and as large
    (folder / "new").rename(file)
    stamps.append(stamp_of_model(folder))
    assert len(set(stamps)) == 3


def test_other_files_do_not_count(folder: Path) -> None:
    stamp, identity = stamp_of_model(folder), identity_of_model(folder)
    for name in ("README.md", "optimizer.safetensors", "model.bin"):
        (folder / name).write_text("?")
    assert (stamp_of_model(folder), identity_of_model(folder)) == (stamp, identity)
    check_model(folder)


def overwritten(path: Path, at: int) -> None:
    """Changes a byte, and neither the size nor the times."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("part", range(SAMPLES))
def test_weights_of_the_same_size_and_time_differ_by_their_samples(folder: Path, part: int) -> None:
    weights = folder / "model.safetensors"
    stamp, identity = stamp_of_model(folder), identity_of_model(folder)
    overwritten(weights, weights.stat().st_size * part // SAMPLES + SAMPLE_BYTES - 1)
    assert stamp_of_model(folder) == stamp
    assert identity_of_model(folder) != identity


@cases
def test_a_path_is_inside_by_where_it_leads(tmp_path: Path, target: str, inside: bool) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    assert is_inside(tmp_path / target, folder) is inside
    link = folder / "link"
    link.symlink_to(tmp_path / target)
    assert is_own(link, folder) is inside


def test_a_snapshot_of_the_hub_has_the_blobs_of_its_own_repository(tmp_path: Path) -> None:
    for repository in ("mine", "other"):
        (tmp_path / repository / "blobs").mkdir(parents=True)
        (tmp_path / repository / "blobs" / "b").write_text("{}")
    snapshot = tmp_path / "mine" / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/b")
    check_model(snapshot)
    (snapshot / "tokenizer.json").symlink_to("../../../other/blobs/b")
    with pytest.raises(ModelUnusable, match=r"tokenizer\.json.*leads out of the folder"):
        check_model(snapshot)
    plain = tmp_path / "mine" / "elsewhere" / "a1"
    plain.mkdir(parents=True)
    (plain / "config.json").symlink_to("../../blobs/b")
    with pytest.raises(ModelUnusable, match="leads out of the folder"):
        check_model(plain)


@pytest.mark.parametrize("name", MOST_BYTES)
def test_a_file_of_more_bytes_than_any_real_one_is_named(folder: Path, name: str) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    for size in (MOST_BYTES[name], MOST_BYTES[name] + 1):
        file.touch()
        os.truncate(file, size)
        if size == MOST_BYTES[name]:
            check_model(folder)
            continue
        with pytest.raises(ModelUnusable) as refused:
            check_model(folder)
        assert f"{name} in the model's folder 'm' is larger than" in refused.value.message


def test_weights_may_be_of_any_size_but_not_of_any_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(folder / "model.safetensors", 1 << 40)
    check_model(folder)
    monkeypatch.setattr(limits, "CHECKPOINT_FILES", 2)
    (folder / "model-2.safetensors").touch()
    check_model(folder)
    (folder / "model-3.safetensors").touch()
    with pytest.raises(ModelUnusable, match="'m' has more than 2 files of weights"):
        check_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "1_Pooling/config.json"])
def test_a_link_to_nowhere_and_a_folder_are_no_files(folder: Path, name: str) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to("gone")
    with pytest.raises(ModelUnusable, match="is not a file"):
        check_model(folder)
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelUnusable, match="is not a file"):
        check_model(folder)
    shutil.rmtree(file)


# Headers of safetensors files: what is read is what the format says, and the rest is refused.


MOST = 1 << 20


def entry(*shape: int, begin: int = 0, dtype: str = "F16") -> dict[str, Any]:
    nbytes = SIZES[dtype] * int(np.prod(shape, dtype=object))
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, begin + nbytes]}


def read(header: Any, data: int = 0, most: int = MOST) -> TensorsHeader:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text
    return read_header(io.BytesIO(file), len(file) + data, most)


def test_a_file_of_the_formats_own_library(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "b": np.ones((2, 3), np.float32),
        "a": np.ones((), np.int8),
        "none": np.ones((0, 7)),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"format": "mlx"})
    found = read_header_of(path, MOST)
    assert found.metadata == {"format": "mlx"}
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()}
    assert shapes == {"b": ("F32", (2, 3)), "a": ("I8", ()), "none": ("F64", (0, 7))}
    b = found.tensors["b"]
    assert path.read_bytes()[b.begin : b.end] == tensors["b"].tobytes()


def test_offsets_are_those_in_the_file() -> None:
    header = {"b": entry(3, begin=4), "a": entry(2)}
    start = 8 + len(json.dumps(header))
    assert read(header, 10).tensors == {
        "a": Tensor("F16", (2,), start, start + 4),
        "b": Tensor("F16", (3,), start + 4, start + 10),
    }


def test_a_header_over_the_limit_is_not_read() -> None:
    text = b"{}".ljust(100)
    assert read(text, most=100).tensors == {}
    with pytest.raises(BadHeader, match="has a header of 100 bytes; the limit is 99"):
        read(text, most=99)
    file = io.BytesIO(b"\xff" * 8 + b"{}")
    with pytest.raises(BadHeader, match="18,446,744,073,709,551,615 bytes"):
        read_header(file, 10, MOST)
    assert file.tell() == 8
