"""`mlx-server service`: what is installed, and what the commands say. The system is faked."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from mlx_server.errors import SettingsError
from mlx_server.system import service
from tests.system.test_service import Recorder

UNIT = ".config/systemd/user/mlx-server.service"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one of a Linux system, in which there is no models.yaml either."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The options of each installation."""
    installed: list[list[str]] = []
    install, uninstall = service.install, service.uninstall

    def noted(options: list[str]) -> service.System:
        installed.append(options)
        return install(options, Recorder("is-active"))

    monkeypatch.setattr(service, "install", noted)
    monkeypatch.setattr(service, "uninstall", lambda: uninstall(Recorder()))
    return installed


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["service", *arguments])


def test_the_options_are_those_of_serve_from_any_folder(
    home: Path, installed: list[list[str]]
) -> None:
    file = home / "mine.yaml"
    file.write_text("server: {host: '::1', port: 7000}\n")
    done = run("install", "--config", "mine.yaml", "--port", "9000")
    assert installed == [["--config", str(file.resolve()), "--port", "9000"]]
    assert "It serves at http://[::1]:9000." in done.output
    run("install", "--config", "mine.yaml")
    assert installed[1:] == [["--config", str(file.resolve())]]


def test_a_mistake_is_shown_before_anything_is_installed(
    home: Path, installed: list[list[str]]
) -> None:
    (home / "models.yaml").write_text("server: {prot: 1}\n")
    for arguments, named in ([], "server.prot"), (["--config", "gone.yaml"], "gone.yaml"):
        error = run("install", *arguments).exception
        assert isinstance(error, SettingsError)
        assert named in error.message
    assert installed == []


def test_a_wrong_port_is_named_before_anything_is_written(installed: list[list[str]]) -> None:
    result = run("install", "--port", "-5")
    assert isinstance(result.exception, SettingsError)
    assert "--port" in result.exception.message
    assert installed == []


def test_it_is_removed_once(home: Path) -> None:
    run("install")
    assert run("uninstall").output == f"Removed {home / UNIT}\n"
    again = run("uninstall")
    assert (again.output, again.exit_code) == ("No service is installed.\n", 0)


def test_the_status_and_its_exit_code_say_whether_it_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("status")
    assert (result.exit_code, "`mlx-server service install`" in result.output) == (3, True)
    run("install")
    for running, code, said in (
        (False, 3, "is installed but not running."),
        (True, 0, "is running."),
    ):
        monkeypatch.setattr(service, "is_running", lambda running=running: running)
        result = run("status")
        assert result.exit_code == code
        assert f"{home / UNIT} {said} To see its log: journalctl" in result.output
