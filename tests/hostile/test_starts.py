"""A server that does not start says why, and not where anything lies: at every log level."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import STOP_SECONDS, end, launch, serving

PLACE = "kanarienvogel"
"""The folder of all that is configured here."""
REPOSITORY = Path(__file__).parents[2]
NOWHERE = (PLACE, str(REPOSITORY), sys.prefix, sys.base_prefix, os.path.expanduser("~") + "/")
LEVELS = ("debug", "info", "warning", "error")

Json = dict[str, Any]
REPLAYED: Json = {"models": {"said": {"source": "replay:said.jsonl", "family": "plain"}}}


@dataclass(frozen=True)
class Failure:
    says: str
    config: Json
    prepare: Callable[[Path, pytest.MonkeyPatch], None] = lambda folder, patched: None
    flags: tuple[str, ...] = ()


def broken_package(folder: Path, patched: pytest.MonkeyPatch) -> None:
    package = folder / "packages" / "mlx_lm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise ImportError('no /{PLACE}/x', name='mlx_lm.x')")
    patched.setenv("PYTHONPATH", str(folder / "packages"))


def no_package(folder: Path, patched: pytest.MonkeyPatch) -> None:
    (folder / "packages").mkdir(parents=True)
    (folder / "packages" / "fastapi.py").write_text(f"open('/{PLACE}/x')")
    patched.setenv("PYTHONPATH", str(folder / "packages"))


def store_is_a_file(folder: Path, patched: pytest.MonkeyPatch) -> None:
    (folder / "data").write_text("not a folder")


def store_is_no_database(folder: Path, patched: pytest.MonkeyPatch) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "responses.sqlite3").mkdir()


FAILURES = {
    "an import of the engine": Failure("ImportError: mlx_lm.x", REPLAYED, broken_package),
    "an import of the server": Failure("FileNotFoundError: No such", REPLAYED, no_package),
    "a key that nobody knows": Failure("models.yaml:", {**REPLAYED, "sevrer": {}}),
    "a folder that is not there": Failure(
        "no such folder: 'gone'", {**REPLAYED, "server": {"adapter_dirs": ["./gone"]}}
    ),
    "a file that is not there": Failure(
        "gone.yaml:1: can't be read", REPLAYED, flags=("--config", f"/{PLACE}/gone.yaml")
    ),
    "a model that is not there": Failure(
        "'gone'", REPLAYED, flags=(f"/{PLACE}/gone", f"/{PLACE}/gone")
    ),
}


@contextmanager
def failing(folder: Path, failure: Failure, *flags: str) -> Iterator[tuple[int, str]]:
    """The exit code, and all that was written."""
    folder.mkdir(parents=True)
    (folder / "said.jsonl").write_text(json.dumps({"match": "regex:.", "output": "Yes."}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLX_SERVER_CACHE", str(folder / "cache"))
        failure.prepare(folder, patched)
        process, log = launch(folder, failure.config, *failure.flags, *flags)
    try:
        code = process.wait(STOP_SECONDS * 4)
        assert process.stdout
        yield code, log.read_text("utf-8") + process.stdout.read()
    finally:
        end(process)


AT_LEVELS = [*((name, LEVELS[0]) for name in FAILURES), *zip(FAILURES, LEVELS[1:], strict=False)]
"""Each at the level at which most is said, and each other level once."""


@pytest.mark.parametrize(("name", "level"), AT_LEVELS)
def test_it_says_why_and_not_where(tmp_path: Path, name: str, level: str) -> None:
    style = ("--log-format", "json") if level == "info" else ()
    with failing(tmp_path / PLACE, FAILURES[name], "--log-level", level, *style) as (code, said):
        assert code not in {0, None}
        assert FAILURES[name].says in said, said
        assert not [place for place in NOWHERE if place in said], said
        assert not re.search(r'File "', said), said


@pytest.mark.parametrize("prepare", [store_is_a_file, store_is_no_database])
def test_a_store_that_can_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., None]
) -> None:
    """All else is served."""
    folder = tmp_path / PLACE
    folder.mkdir()
    (folder / "said.jsonl").write_text(json.dumps({"match": "regex:.", "output": "Yes."}))
    monkeypatch.setenv("MLX_SERVER_CACHE", str(folder / "cache"))
    prepare(folder, monkeypatch)
    with serving(folder, REPLAYED, "--log-level", "debug") as server, server.http() as http:
        asked = {"model": "said", "input": "Hi"}
        refused = http.post("/v1/responses", json=asked)
        assert refused.status_code == 503
        reported = server.log + refused.text
    assert "store" in reported
    assert not [place for place in NOWHERE if place in reported], reported


ENDINGS = {
    "a thread": "threading.Thread(target=fail).start()",
    "the main one": "fail()",
    "a finaliser": "class A:\n    __del__ = lambda self: fail()\na = A()\ndel a",
    "a library's message": "logging.getLogger('lib').error('no %s', '/kanarienvogel/b/name')",
    "a library's trace": "try: fail()\nexcept OSError: "
    "logging.getLogger('lib').error(traceback.format_exc())",
    "a message that can't be made": "logging.getLogger('lib').error('%d', '/kanarienvogel/x')",
    "a warning": "import warnings; warnings.warn('/kanarienvogel/x')",
}
PROGRAM = """
import logging, threading, traceback
from mlx_server.system import logs
logs.configure("debug", "STYLE")
def fail():
    open("/kanarienvogel/some where/name")
"""


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_no_way_past_the_log(tmp_path: Path, ending: str, style: str) -> None:
    folder = tmp_path / PLACE
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("STYLE", style) + ENDINGS[ending])
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert not [place for place in NOWHERE if place in done.stderr], done.stderr
    quiet = {"a warning", "a message that can't be made"}
    assert bool(done.stderr) == (ending not in quiet)
