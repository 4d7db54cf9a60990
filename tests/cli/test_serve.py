"""`mlx-server serve`: the settings that it runs, and its exit code."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from mlx_server.cli import app, startup
from mlx_server.config.settings import Settings
from mlx_server.system import logs
from tests.live.fork_server import ran

pytestmark = pytest.mark.usefixtures("folder")


def test_serve_runs_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    fake = ModuleType("mlx_server.app")
    fake.run = lambda settings, log_file: served.append(settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx_server.app", fake)
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # it would be so for later tests too
    monkeypatch.setattr(startup, "check_named", lambda settings, named: None)  # no hub is asked
    flags = ["--port", "0", "--host", "::1", "--api-key", "a", "--api-key", "b"]
    flags += ["--concurrency", "3", "--log-level", "debug"]
    assert CliRunner().invoke(app, ["serve", "x/y", *flags]).exit_code == 0
    (settings,) = served
    server = settings.server
    assert list(settings.models) == ["x/y"]
    assert [key.get_secret_value() for key in server.api_keys] == ["a", "b"]
    assert (server.port, server.host, server.concurrency) == (0, "::1", 3)
    assert server.log_level == "debug"


@pytest.mark.slow
def test_wrong_settings_exit_with_2() -> None:
    Path("bad.yaml").write_text("server:\n  prot: 1\n  drain_seconds: -1\n")
    result = ran("serve", "--config", "bad.yaml", "--api-key", "sk-secret x")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "bad.yaml:2: server.prot: unknown key: did you mean `port`?",
        "bad.yaml:3: server.drain_seconds: should be at least 0",
        "--api-key: a key should be one or more visible ASCII characters",
    ]
    assert result.stdout == ""
    assert ran("serve", "--host", "0.0.0.0").returncode == 2
    assert ran("serve", "--nonsense").returncode == 2
