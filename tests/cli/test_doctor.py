"""`mlx-server doctor`: what it checks, what it shows, and what it does without."""

import json
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from mlx_server.engine import blas
from tests.cli.running import run

pytestmark = [pytest.mark.tables, pytest.mark.usefixtures("folder")]


def test_doctor_is_content_with_a_good_file() -> None:
    Path("models.yaml").write_text("models: {a: {source: x/y}}\n")
    result = run("doctor")
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stdout
    names = {name for _, name, _ in lines}
    assert names >= {"python", "packages", "platform", "mlx", "memory", "cache", "settings"}
    assert names >= {"port", "engine", "demo"}
    assert ["ok", "settings", "models.yaml: serves a"] in lines
    assert "\x1b" not in result.stdout


def test_doctor_tells_a_bug_report_what_it_needs_and_no_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        Path("models.yaml").write_text(
            f"server: {{port: {port}, api_keys: [a-key], queue: 3}}\n"
            "models: {a: {source: x/y}}\n"
        )
        result = run("doctor", "--json")
    assert result.returncode == 0, result.stdout
    found = {check["name"]: check for check in json.loads(result.stdout)}
    for package in ("mlx", "mlx-lm", "llguidance"):
        assert f"{package} {version(package)}" in found["packages"]["found"]
    assert "queue: 3" in found["server"]["found"]
    assert "a-key" not in result.stdout
    assert (found["port"]["status"], "--port" in found["port"]["fix"]) == ("warn", True)
    assert found["engine"]["found"].startswith("starts in ")


def test_doctor_tells_every_problem_on_a_line_of_its_own() -> None:
    Path("bad.yaml").write_text(f"models:\n  a: {{source: {'x' * 300}, aliases: [a]}}\n  b: 1\n")
    result = run("doctor", "--config", "bad.yaml")
    assert result.returncode == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("fail")] == [
        "fail settings  bad.yaml:2: models.a.aliases[0]: the name is taken by `models.a`",
        "fail settings  bad.yaml:3: models.b: should be a mapping",
    ]


def test_fast_blas_takes_the_first_that_has_cblas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "LIBRARIES", ("libnot-here.so.4", "libc.so.6"))
    assert blas.fast_blas() is None
    monkeypatch.setattr(blas, "_has_cblas", lambda library: True)
    assert blas.fast_blas() == "libnot-here.so.4"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.fast_blas() is None
