"""The files of a service, read back by the formats' own readers; the commands are faked."""

import configparser
import plistlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mlx_server.errors import ServerError, SettingsError
from mlx_server.system import service
from tests.tables import cases

ARGUMENTS = ["--config", "/Users/me/my models.yaml", "--port", "9000"]


class Recorder:
    """Stands for launchctl and systemctl: notes commands, and fails those that are named."""

    def __init__(self, *failing: str) -> None:
        self.commands: list[str] = []
        self._failing = failing

    def __call__(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        line = shlex.join(command)
        self.commands.append(line)
        code = int(any(word in line for word in self._failing))
        return subprocess.CompletedProcess(command, code, "", "not possible" if code else "")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "secret")
    return tmp_path


def test_the_launch_agent_serves_and_is_kept_alive(home: Path) -> None:
    found = plistlib.loads(service.launch_agent(ARGUMENTS).encode())
    serve = [sys.executable, "-m", "mlx_server", "serve"]
    log = str(home / "Library/Logs/mlx-server/server.log")
    assert found["ProgramArguments"] == [*serve, *ARGUMENTS, "--log-file", log]
    assert (found["RunAtLoad"], found["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert found["SoftResourceLimits"]["NumberOfFiles"] == 8192
    assert "secret" not in service.launch_agent(ARGUMENTS)


@pytest.mark.parametrize("word", ["a b", 'q"uote', "100%", "$HOME", "back\\slash", "ü", "a\xa0b"])
def test_the_unit_keeps_every_word_as_it_is(word: str) -> None:
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(service.systemd_unit(["--config", word]))
    command = unit["Service"]["ExecStart"].replace("%%", "%").replace("$$", "$")
    assert shlex.split(command) == [sys.executable, "-m", "mlx_server", "serve", "--config", word]
    assert unit["Service"]["LimitNOFILE"] == "8192"
    assert unit["Service"]["RestartPreventExitStatus"] == "2"
    assert unit["Service"]["KillMode"] == "mixed"
    assert unit["Install"]["WantedBy"] == "default.target"


@pytest.mark.parametrize("write", [service.systemd_unit, service.launch_agent])
@pytest.mark.parametrize("word", ["a\nExecStartPre=rm", "a\rb", "a\x01b", "a\x85b", "a\udcff"])
def test_a_word_that_no_service_can_have_is_refused(
    write: Callable[[Sequence[str]], str], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="character"):
        write(["--config", word])
    monkeypatch.setenv("PATH", f"/bin:{word}")
    with pytest.raises(SettingsError, match="character"):
        write([])


def test_install_writes_the_file_for_its_owner_alone_and_starts_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    commands = Recorder()
    found = service.install(ARGUMENTS, commands)
    assert found.file == home / ".config/systemd/user/mlx-server.service"
    assert found.file.stat().st_mode & 0o777 == 0o600
    assert commands.commands == [
        "systemctl --user daemon-reload",
        "systemctl --user enable mlx-server.service",
        "systemctl --user restart mlx-server.service",
    ]
    assert service.is_running(Recorder())
    assert not service.is_running(Recorder("is-active"))


def test_a_mac_that_has_it_already_gets_it_anew(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    first = service.install([], Recorder())
    commands = Recorder("bootout", "print")  # it had been stopped by hand
    assert service.install(ARGUMENTS, commands).file == first.file
    assert [line.split()[1] for line in commands.commands] == ["bootout", "print", "bootstrap"]
    assert "9000" in first.file.read_text()


def test_a_service_that_still_drains_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    service.install([], Recorder())
    commands, looks = Recorder(), iter([0, 0, 113])
    waited: list[float] = []
    monkeypatch.setattr("mlx_server.system.service.time.sleep", waited.append)

    def run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        commands(command)
        return subprocess.CompletedProcess(
            command, next(looks) if "print" in command else 0, "", ""
        )

    service.install(ARGUMENTS, run)
    done = [line.split()[1] for line in commands.commands]
    assert done == ["bootout", "print", "print", "print", "bootstrap"]
    assert len(waited) == 2


def test_without_the_systems_command_no_file_is_left(home: Path) -> None:
    def missing(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        raise service.CommandMissing("it was not found")

    with pytest.raises(service.CommandMissing):
        service.install([], missing)
    assert not service.system().file.exists()


@cases
def test_the_process_of_the_service(printed: str, pid: int | None) -> None:
    def run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 0, printed, "")

    if pid:
        assert service.main_pid(run) == pid
    else:
        with pytest.raises(ServerError, match="does not run"):
            service.main_pid(run)
