"""Folders of very many files, files that are none, disks that can't be written, low limits."""

import hashlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.errors import AdapterInvalid, AdapterNotFound, ModelUnusable, ServerError
from mlx_server.models.adapter_catalog import AdapterCatalog, BaseModelShapes
from mlx_server.models.adapter_config import CONFIG, MLX_WEIGHTS
from mlx_server.models.checkpoint import read_checkpoint
from mlx_server.models.files import check_model, missing_of, stamp_of_model, weights_bytes
from mlx_server.sources.tokenizer_files import tokenizer_json
from mlx_server.system import descriptors
from tests.live.server import STOP_SECONDS, LiveServer, end, eventually, launch, serving
from tests.models.adapter_files import mlx_adapter, mlx_tensors

HANG = 20.0
MANY = 40
FEW = 4


# Adapters


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the folders whose files the catalog has looked for."""
    names: list[str] = []
    exists = os.path.lexists

    def noted(path: Path) -> bool:
        if path.name == CONFIG:
            names.append(path.parent.name)
        return exists(path)

    monkeypatch.setattr(os.path, "lexists", noted)
    return names


def many_adapters(folder: Path) -> AdapterCatalog:
    for number in range(MANY):
        mlx_adapter(folder / f"a{number:03}")
    return AdapterCatalog(BaseModelShapes(), folder=folder)


def test_a_request_looks_at_the_adapter_that_it_names(tmp_path: Path, looked_at: list[str]) -> None:
    catalog = many_adapters(tmp_path / "adapters")
    assert catalog.find("a007").name == "a007"
    assert set(looked_at) == {"a007"}
    spec, _ = catalog.find_folder(tmp_path / "adapters" / "a008")
    assert spec.name == "a008"
    assert set(looked_at) == {"a007", "a008"}
    with pytest.raises(AdapterNotFound):
        catalog.find("b")
    assert set(looked_at) == {"a007", "a008"}


def test_a_list_of_adapters_ends_and_says_so(
    tmp_path: Path,
    looked_at: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(limits, "LISTED_ADAPTERS", FEW)
    catalog = many_adapters(tmp_path / "adapters")
    assert list(catalog.all()) == [f"a{number:03}" for number in range(FEW)]
    assert len(set(looked_at)) == FEW
    assert f"adapters has {MANY} entries" in caplog.text
    assert catalog.find("a039").name == "a039"
    caplog.clear()
    monkeypatch.setattr(limits, "LISTED_ADAPTERS", MANY)
    assert len(catalog.all()) == MANY
    assert caplog.text == ""


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # a socket's own path may not be long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # endless zeros


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": pipe,
    "a socket": unix_socket,
    "a device": device,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
}


def in_place_of(path: Path, kind: str) -> None:
    path.unlink()
    try:
        NO_FILES[kind](path)
    except OSError as error:
        pytest.skip(f"{kind} can't be made here: {error.strerror}")


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize(
    "name", [CONFIG, MLX_WEIGHTS, "config.json", "tokenizer.json", "model.safetensors"]
)
def test_what_is_no_file_is_not_opened(
    tmp_path: Path, tiny_path: Path, name: str, kind: str
) -> None:
    folder = tmp_path / "folder"
    if name in (CONFIG, MLX_WEIGHTS):
        mlx_adapter(folder)
    else:
        shutil.copytree(tiny_path, folder)
    in_place_of(folder / name, kind)
    read = find_adapter if name in (CONFIG, MLX_WEIGHTS) else check_model
    refused = r"is not a file|link to outside|leads out"
    with pytest.raises((AdapterInvalid, ModelUnusable), match=refused):
        read(folder)


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_folder_is_no_adapter(tmp_path: Path, kind: str) -> None:
    adapters = tmp_path / "adapters"
    mlx_adapter(adapters / "sound")
    (adapters / "a").touch()
    in_place_of(adapters / "a", kind)
    catalog = AdapterCatalog(BaseModelShapes(), folder=adapters)
    assert list(catalog.all()) == ["sound"]
    with pytest.raises(AdapterNotFound):
        catalog.find("a")


def test_a_file_that_is_cut_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {
        name: tensor.repeat(1000, axis=int(name.endswith("b")))
        for name, tensor in mlx_tensors().items()
    }
    folder = mlx_adapter(tmp_path / "a", long)
    size = (folder / MLX_WEIGHTS).stat().st_size
    digest = hashlib.sha256

    def cut(begun: bytes) -> Any:
        """It is called when the header was read and the weights were not."""
        os.truncate(folder / MLX_WEIGHTS, size // 2)
        return digest(begun)

    monkeypatch.setattr(hashlib, "sha256", cut)
    with pytest.raises(AdapterInvalid, match="is cut short"):
        AdapterCatalog(BaseModelShapes(), folder=tmp_path).find("a")


# Files that are replaced after they were checked


def read_model(folder: Path) -> None:
    read_checkpoint(folder, None)
    weights_bytes(folder, upcast=True)


def read_kimi(folder: Path) -> None:
    tokenizer_json(folder)


def find_adapter(folder: Path) -> None:
    AdapterCatalog(BaseModelShapes(), folder=folder.parent).find(folder.name)


SWAPPED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a config": ("config.json", read_model),
    "a tokenizer": ("tokenizer.json", read_model),
    "weights": ("model.safetensors", read_model),
    "tiktoken's tokens": ("tiktoken.model", read_kimi),
    "SentencePiece's tokens": ("tokenizer.model", read_kimi),
    "an adapter's config": (CONFIG, find_adapter),
    "an adapter's weights": (MLX_WEIGHTS, find_adapter),
}


@pytest.mark.parametrize("what", SWAPPED)
def test_a_pipe_that_takes_the_place_of_a_file_keeps_nobody_waiting(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name, read = SWAPPED[what]
    folder = tmp_path / "folder"
    if read is find_adapter:
        mlx_adapter(folder)
    elif read is read_kimi:
        folder.mkdir()
    else:
        shutil.copytree(tiny_path, folder)
    (folder / name).unlink(missing_ok=True)
    pipe(folder / name)
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.name == name or is_file(path))
    failed: list[BaseException] = []

    def reading() -> None:
        try:
            read(folder)
        except Exception as error:
            failed.append(error)

    reader = threading.Thread(target=reading, daemon=True)  # without the fix it never ends
    reader.start()
    reader.join(HANG)
    (error,) = failed
    assert isinstance(error, ServerError | OSError)
    assert "not a file" in str(error) or "can't be read" in str(error)


# Checkpoints


SMALL_FILES = ["config.json", "tokenizer.json"]


def test_names_of_shards_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred empty files could name ten million others."""
    most = limits.CHECKPOINT_FILES
    whole = [f"model-{number:05}-of-{most:05}.safetensors" for number in range(1, most + 1)]
    assert missing_of([*SMALL_FILES, *whole]) == []
    lacking = missing_of([*SMALL_FILES, whole[0]])
    assert lacking[0] == whole[1]
    assert lacking[-1] == f"{most - 1 - (len(lacking) - 1)} more files"
    assert sum(map(len, lacking)) < 1000
    for names in (
        ["model-00001-of-99999.safetensors"],
        [f"model-00001-of-{most + 1:05}.safetensors"],
        [f"model{n}-00001-of-{most // 2:05}.safetensors" for n in range(3)],
        [f"model{n}.safetensors" for n in range(most + 1)],
    ):
        with pytest.raises(ModelUnusable, match="more than 1,000 files of weights"):
            missing_of([*SMALL_FILES, *names])


def test_no_more_weights_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHECKPOINT_FILES", FEW)
    for number in range(MANY):
        (tmp_path / f"model-{number}.safetensors").touch()
    with pytest.raises(ModelUnusable, match="more than 4 files of weights"):
        check_model(tmp_path)
    assert len(stamp_of_model(tmp_path)) == FEW + 1


# Limits of the process


def test_too_few_descriptors_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = descriptors.FEWEST - 1
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(
        f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({few}, {few}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(packages))
    process, log = launch(tmp_path, {})
    try:
        assert process.wait(STOP_SECONDS * 4) == 2
    finally:
        end(process)
    said = log.read_text("utf-8")
    assert f"Only {few} files and sockets can be open at once" in said
    assert "Traceback" not in said


# Disks that can't be written


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()[:100]}")


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid():
        pytest.skip("only root can mount a disk here")
    mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    mount("-o", f"remount,{how}", str(folder))


ASKED = {"model": "tiny", "input": "Hi", "max_output_tokens": 2, "temperature": 0}


def answers(server: LiveServer, *, store: bool) -> int:
    with server.http() as http:
        return http.post("/v1/responses", json={**ASKED, "store": store}).status_code


def test_a_disk_that_can_not_be_written(tmp_path: Path, tiny_path: Path) -> None:
    """Models and adapters are read from it, and the store is back when it can be written again."""
    (tmp_path / "server").mkdir()
    with disk(tmp_path / "server" / "data") as folder:  # where its store is, too
        shutil.copytree(tiny_path, folder / "tiny")
        mlx_adapter(folder / "adapters" / "a")
        config = {
            "server": {"adapters_dir": str(folder / "adapters")},
            "models": {"tiny": {"source": str(folder / "tiny")}},
        }
        remount(folder, "ro")
        with serving(tmp_path / "server", config) as server:
            assert answers(server, store=True) == 503
            assert answers(server, store=False) == 200
            with server.http() as http:
                assert http.get("/health").status_code == 200
                assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["tiny"]
            remount(folder, "rw")
            eventually(lambda: answers(server, store=True) == 200, "it can be written again")
            assert "Traceback" not in server.log
            assert str(folder) not in server.log
