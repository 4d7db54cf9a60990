"""`mlx-server serve` with models on its command line, some or all of which can't be served."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.server import serving


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")


def serve(folder: Path, *named: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mlx_server", "serve", "--port", "0", *named]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("empty", "lacks config.json"),
        ("org/not-there", "hub can't be reached"),
        ("./gone", "The folder 'gone' does not exist"),
    ],
)
def test_nothing_that_can_be_served_is_the_end(tmp_path: Path, named: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    ended = serve(tmp_path, named)
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "Listening" not in ended.stdout


def test_each_of_several_is_named_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = serve(tmp_path, "empty", "./gone")
    assert ended.returncode == 2
    assert [line.split(":")[0] for line in ended.stderr.splitlines()] == ["empty", "gone"]


def test_with_one_that_can_be_served_the_others_are_listed(tmp_path: Path, tiny_path: Path) -> None:
    with serving(tmp_path / "run", None, str(tiny_path), str(tmp_path / "gone")) as server:
        assert "gone can't be served: The folder 'gone' does not exist" in server.log
        with server.http() as http:
            asked = {"model": tiny_path.name, "prompt": "a", "max_tokens": 2}
            assert http.post("/v1/completions", json=asked).status_code == 200
