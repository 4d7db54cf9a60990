"""`mlx-server doctor`: what it finds on this machine, and whether the engine starts."""

import json
import os
import shutil
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.cli import machine_checks
from mlx_server.cli.doctor import quality_checks, run_engine_check
from tests.live.fork_server import ran
from tests.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.slow
def test_doctor_is_content_with_a_good_file() -> None:
    Path("models.yaml").write_text(
        "models: {a: {source: x/y}}\nconnectors: {web: {command: no-such}, sh: {command: sh}}\n"
    )
    result = ran("doctor")
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stdout
    names = {name for _, name, _ in lines}
    assert names >= {"python", "packages", "platform", "mlx", "memory", "cache", "settings"}
    assert names >= {"port", "engine", "demo"}
    assert ["ok", "settings", "models.yaml: serves a"] in lines
    assert [what for status, name, what in lines if name == "connector"] == [
        "web: There is no program 'no-such': install it, or correct `command` in models.yaml."
    ]
    assert "\x1b" not in result.stdout


@pytest.mark.slow
def test_doctor_tells_a_bug_report_what_it_needs_and_no_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        Path("models.yaml").write_text(
            f"server: {{port: {port}, api_keys: [a-key], max_body_bytes: 3}}\n"
            "models: {a: {source: x/y}}\n"
        )
        result = ran("doctor", "--json")
    assert result.returncode == 0, result.stdout
    found = {check["name"]: check for check in json.loads(result.stdout)}
    for package in ("mlx", "mlx-lm", "llguidance"):
        assert f"{package} {version(package)}" in found["packages"]["found"]
    assert "max_body_bytes: 3" in found["server"]["found"]
    assert "a-key" not in result.stdout
    assert (found["port"]["status"], "--port" in found["port"]["found"]) == ("warn", True)
    assert found["engine"]["found"].startswith("starts in ")


@pytest.mark.slow
def test_doctor_tells_every_problem_on_a_line_of_its_own() -> None:
    Path("bad.yaml").write_text(f"models:\n  a: {{source: {'x' * 300}, aliases: [a]}}\n  b: 1\n")
    result = ran("doctor", "--config", "bad.yaml")
    assert result.returncode == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("fail")] == [
        "fail settings  bad.yaml:2: models.a.aliases[0]: the name is taken by `models.a`",
        "fail settings  bad.yaml:3: models.b: should be a mapping",
    ]


MAC_PROBE = """
import json
print(json.dumps({"version": "1", "gpu": True, "name": "M", "working_set": 22906503168}))
"""


def test_doctor_tells_what_is_wired() -> None:
    says = "weights that take 10.7 GB to 19.3 GB are kept resident"
    assert says in machine_checks._wired(20 << 30).found
    assert "only Metal" in machine_checks._wired(None).found


def test_doctor_sees_what_only_flags_and_environment_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_HOST", "0.0.0.0")
    (check,) = [check for check in machine_checks.examine(None) if check.name == "settings"]
    assert check.status == "fail"
    assert "allow_insecure" in check.found


def test_doctor_says_what_the_budget_is_and_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_checks, "PROBE", MAC_PROBE)

    def found() -> machine_checks.Check:
        (check,) = [check for check in machine_checks.examine(None) if check.name == "budget"]
        return check

    assert (found().status, found().fix) == ("ok", "")
    assert found().found == (
        "21.5 GB for weights and caches: the GPU's recommended working set (22.9 GB) minus "
        "1.4 GB to compute in; change it with `memory_budget` in models.yaml"
    )
    Path("models.yaml").write_text("server: {memory_budget: 24GB}\nmodels: {m: {source: a/b}}")
    assert found().status == "warn"
    assert "24.0 GB is more than the 22.9 GB that are recommended for this GPU" in found().fix


def test_doctor_says_that_cuda_is_installed_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"mlx-cuda-13": "0.32.4"}
    monkeypatch.setattr(
        machine_checks, "version", lambda name: installed.get(name) or version(name)
    )
    (check,) = [check for check in machine_checks.examine(None) if check.name == "mlx"]
    assert check.status == "warn"
    assert "CPU, though mlx-cuda-13 is installed" in check.found
    assert "pip install --force-reinstall --no-deps mlx-cuda-13" in check.fix


@pytest.mark.parametrize(
    ("probe", "found"),
    [
        ("raise ImportError('no mlx here')", "ImportError: no mlx here"),
        ("import os; os.abort()", "ended with status -6"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_doctor_survives_a_broken_mlx(
    probe: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "PROBE", probe)
    monkeypatch.setattr(machine_checks, "PROBE_SECONDS", 0.5 if "sleep" in probe else 60)
    (check,) = [check for check in machine_checks.examine(None) if check.name == "mlx"]
    assert (check.status, check.found) == ("fail", found)
    assert check.fix.startswith("pip install")


@pytest.mark.parametrize("name", ["cache", "data"])
def test_doctor_wants_folders_it_can_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (folder / "file").touch(0o777)
    monkeypatch.setenv(f"MLX_SERVER_{name.upper()}", str(folder / "file" / "cache"))
    (check,) = [check for check in machine_checks.examine(None) if check.name == name]
    assert check.status == "fail"
    assert f"MLX_SERVER_{name.upper()}" in check.fix
    assert check.found == f"{folder / 'file'} is not a writable folder"


def test_doctor_goes_on_after_a_folder_that_can_not_be_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one in another user's home: the system raises an error for this name, too."""
    monkeypatch.setenv("MLX_SERVER_DATA", str(folder / ("x" * 300)))
    names = [check.name for check in machine_checks.examine(None)]
    assert {"data", "port"} <= {*names}


def test_doctor_reads_the_models_that_are_here(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "PROBE", MAC_PROBE)
    shutil.copytree(tiny_path, "pointed")
    Path("pointed/tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    models = {"a": str(tiny_path), "b": "./nothere", "c": "./pointed", "d": "org/name"}
    listed = {id: {"source": source} for id, source in models.items()}
    Path("models.yaml").write_text(json.dumps({"models": listed}))
    checks = [check for check in machine_checks.examine(None) if check.name == "models"]
    failed = [check.found for check in checks if check.status == "fail"]
    assert [found[:40] for found in failed] == [
        "b: The folder 'nothere' does not exist. ",
        "c: tokenizer.json is a Git LFS pointer, ",
    ]
    assert [check.found for check in checks if check.status == "ok"] == ["a"]


def test_doctor_tells_of_an_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (check,) = run_engine_check()
    assert (check.status, check.name) == ("fail", "engine")
    assert check.found == "FileNotFoundError: No such file or directory: 'python'"


def test_doctor_finds_a_model_that_computes_otherwise_than_it_did(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny")
    Path("models.yaml").write_text(f"models: {{tiny: {{source: {model}}}}}\n")
    weights, other = model / "model.safetensors", tmp_path / "other.safetensors"
    planted: Any = mx.load(str(weights))
    mx.save_safetensors(str(weights), planted, {"format": "mlx"})  # as it is saved again below
    (first,) = quality_checks(None)
    (again,) = quality_checks(None)
    assert (first.status, "remembered" in first.found) == ("ok", True)
    assert (again.status, "by rounding alone" in again.found) == ("ok", True)
    status = weights.stat()
    name = next(name for name in planted if name.endswith("layers.1.mlp.down_proj.weight"))
    mx.save_safetensors(str(other), {**planted, name: planted[name] * 1.01}, {"format": "mlx"})
    shutil.copyfile(other, weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    (faulty,) = quality_checks(None)
    assert (faulty.status, "tiny: differs by" in faulty.found) == ("fail", True), faulty
