"""scripts/serve and scripts/test-newest on a machine that has nothing yet, with a stand-in for
Python and pip."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/sh
case "$*" in
    --version) echo "Python 3.13.1" ;;
    "-m venv "*)
        for folder in "$@"; do :; done
        mkdir -p "$folder/bin"
        cp "$0" "$folder/bin/python"
        for name in mlx-server pytest; do
            printf '#!/bin/sh\\necho "%s $*"\\n' "$name" >"$folder/bin/$name"
            chmod +x "$folder/bin/$name"
        done ;;
    *"pip install "*)
        case "$* without $WITHOUT" in
            *" uv without uv" | "-m uv pip "*" without packages") exit 1 ;;
            *" uv without "*) exit 0 ;;
        esac
        if [ -t 1 ]; then echo "a terminal's bar"; else echo "no terminal"; fi
        echo "asked: $*" ;;
    *version*) echo "imports from $PYTHONPATH" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The parts of a clone that the scripts need, and a Python."""
    (tmp_path / "scripts").mkdir()
    for script in ("serve", "test-newest", "_venv"):
        shutil.copy(ROOT / "scripts" / script, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def serve(clone: Path, *arguments: str, without: str = "") -> str:
    """What a person sees in a terminal."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "PYTHON": str(clone / "python"), "WITHOUT": without}
    command = [str(clone / "scripts" / "serve"), *arguments]
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = bytearray()
    try:
        while piece := os.read(ours, 4096):
            seen += piece
    except OSError:  # how Linux says that the other end is closed
        assert sys.platform == "linux"
    os.close(ours)
    assert process.wait() == 0
    return seen.decode().replace("\r\n", "\n")


def test_the_first_start_says_what_it_does_and_shows_its_progress(clone: Path) -> None:
    seen = serve(clone, "--port", "8001")
    said, *rest = seen.splitlines()
    assert "making .venv with Python 3.13.1" in said
    assert "takes about a minute, but only once" in said
    assert rest == [
        "a terminal's bar",
        f"asked: -m uv pip install --python {clone}/.venv/bin/python --editable .",
        "mlx-server serve --port 8001",
    ]


@pytest.mark.parametrize("without", ["uv", "packages"])
def test_pip_installs_where_uv_can_not(clone: Path, without: str) -> None:
    """Where there is no uv for pip, or where uv finds no packages."""
    _, why, bar, asked, served = serve(clone, without=without).splitlines()
    assert "uv can't install here; pip" in why
    assert bar == "a terminal's bar"
    assert asked.startswith("asked: -m pip install ")
    assert asked.endswith(" --editable .")
    assert served == "mlx-server serve"


def test_the_second_start_installs_nothing_and_a_changed_project_does(clone: Path) -> None:
    serve(clone)
    assert serve(clone) == "mlx-server serve\n"
    (clone / "pyproject.toml").write_text("[project]\n")
    assert "bringing .venv up to date" in serve(clone)
    assert serve(clone) == "mlx-server serve\n"


def test_a_python_that_can_not_be_used_is_named_with_what_to_do(clone: Path) -> None:
    environment = {**os.environ, "PYTHON": str(clone / "missing")}
    failed = subprocess.run(
        [str(clone / "scripts" / "serve")], env=environment, capture_output=True, text=True
    )
    assert failed.returncode == 1
    assert "3.11 to 3.14" in failed.stderr


@pytest.mark.slow
def test_a_gpu_is_checked_part_by_part() -> None:
    """Here on a CPU, which lacks one combination: its error is part of the report."""
    parts = ("machine", "batch_against_alone", "deterministic", "first_token", "soak")
    command = [sys.executable, "-m", "gpu_parts", "--small", "--seconds", "1"]
    command += [word for part in parts for word in ("--part", part)]
    path = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE)
    report = json.loads(run.stdout)
    assert (tuple(report), run.returncode) == (parts, 0), report
    companies = report["batch_against_alone"]["result"]
    assert companies["dense float32"]["2"]["different_answers"] == 0
    assert companies["dense affine4"]["2"]["logit"] < 1e-3
    assert "float32" in companies["experts float16"]["error"]
    assert report["deterministic"]["result"]["experts float32"]["deterministic"] == {
        "in_company": 0,
        "warm": 0,
    }
    assert report["soak"]["result"]["rows"] > 0
