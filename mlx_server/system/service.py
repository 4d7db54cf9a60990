"""`mlx-server service`: the system starts the server with the user's session, and restarts it.

On a Mac the service is a LaunchAgent, on Linux a systemd user unit. This module writes their files
and calls `launchctl` and `systemctl`.
"""

import os
import plistlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_server.errors import ServerError, SettingsError
from mlx_server.system.files import replace_file

LABEL = "local.mlx-server"
UNIT = "mlx-server.service"

DESCRIPTORS = 8192
"""Limit of open files: launchd's own soft limit is 256."""

EXIT_SECONDS = 30
"""The time that the system lets a server drain before it kills it."""

UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and the bytes of a path that are not UTF-8."""

PID = re.compile(r"^\s*(?:MainPID=|pid = )([1-9][0-9]*)$", re.MULTILINE)
"""How systemd and launchd write it."""

LOOK_SECONDS = 0.5
STOP_LOOKS = int((EXIT_SECONDS + 5) / LOOK_SECONDS)

SERVE = (sys.executable, "-m", "mlx_server", "serve")

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class CommandMissing(ServerError):
    """This system has no service manager that is known here."""


@dataclass(frozen=True)
class System:
    """The commands and files by which this operating system runs a user's services."""

    file: Path
    text: Callable[[Sequence[str]], str]
    start: tuple[tuple[str, ...], ...]
    """Commands that load the file and start the service."""
    stop: tuple[tuple[str, ...], ...]
    status: tuple[str, ...]
    """Command that exits with 0 if the service runs."""
    pid: tuple[str, ...]
    """Command that prints the id of its process."""
    log: str
    """Shell command that shows the server's log."""


def system() -> System:
    return _launchd() if sys.platform == "darwin" else _systemd()


def _launchd() -> System:
    domain = f"gui/{os.getuid()}"
    file = Path.home() / "Library/LaunchAgents" / f"{LABEL}.plist"
    return System(
        file,
        launch_agent,
        start=(("launchctl", "bootstrap", domain, str(file)),),
        stop=(("launchctl", "bootout", f"{domain}/{LABEL}"),),
        status=("launchctl", "print", f"{domain}/{LABEL}"),
        pid=("launchctl", "print", f"{domain}/{LABEL}"),
        log=shlex.join(("tail", "-f", str(_mac_log()))),
    )


def _systemd() -> System:
    control = ("systemctl", "--user")
    folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return System(
        Path(folder) / "systemd/user" / UNIT,
        systemd_unit,
        start=(
            (*control, "daemon-reload"),
            (*control, "enable", UNIT),
            (*control, "restart", UNIT),
        ),
        stop=((*control, "disable", "--now", UNIT),),
        status=(*control, "is-active", "--quiet", UNIT),
        pid=(*control, "show", "--property=MainPID", UNIT),
        log=f"journalctl --user -u {UNIT} -f",
    )


def _mac_log() -> Path:
    return Path.home() / "Library/Logs/mlx-server/server.log"


def _path() -> str:
    return os.environ.get("PATH", os.defpath)


def launch_agent(arguments: Sequence[str]) -> str:
    """arguments: those of `mlx-server serve`."""
    _check([*SERVE, *arguments, str(_mac_log()), _path()])
    properties = {
        "Label": LABEL,
        # launchd does not rotate logs, so the server does
        "ProgramArguments": [*SERVE, *arguments, "--log-file", str(_mac_log())],
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ProcessType": "Interactive",  # macOS slows down other types
        "ExitTimeOut": EXIT_SECONDS,
        "SoftResourceLimits": {"NumberOfFiles": DESCRIPTORS},
        "HardResourceLimits": {"NumberOfFiles": DESCRIPTORS},
        "WorkingDirectory": str(Path.home()),
        "EnvironmentVariables": {"PATH": _path()},
    }
    return plistlib.dumps(properties, sort_keys=False).decode()


def systemd_unit(arguments: Sequence[str]) -> str:
    """arguments: those of `mlx-server serve`."""
    words = [*SERVE, *arguments]
    _check([*words, _path()])
    command = " ".join(_quoted(word).replace("$", "$$") for word in words)
    return (
        "[Unit]\n"
        "Description=mlx-server, a local inference server\n"
        "\n"
        "[Service]\n"
        f"ExecStart={command}\n"
        "WorkingDirectory=%h\n"
        f"Environment={_quoted('PATH=' + _path())}\n"
        "ExecReload=kill -HUP $MAINPID\n"
        "KillMode=mixed\n"  # the first process tells those that have replaced it
        "Restart=on-failure\n"
        "RestartSec=10\n"
        # a restart does not fix wrong settings
        "RestartPreventExitStatus=2\n"
        f"TimeoutStopSec={EXIT_SECONDS}\n"
        f"LimitNOFILE={DESCRIPTORS}\n"
        "\n"
        "[Install]\n"
        "WantedBy=default.target\n"
    )


def _quoted(word: str) -> str:
    """Quotes a word as in systemd.syntax(7): `%` is doubled, quotes are escaped as in C. In a
    command `$` has to be doubled too, but not in the environment."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _check(words: Sequence[str]) -> None:
    """Raises SettingsError for characters that the files of services can't have, or that end a
    line there."""
    for word in words:
        if UNWRITABLE.search(word):
            raise SettingsError(f"{word!r} has a character that a service can't have. Rename it.")


def run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise CommandMissing(
            f"{command[0]} was not found, so no service can be installed. Start `mlx-server serve` "
            "with this system's own service manager."
        ) from None
    except subprocess.TimeoutExpired:
        raise ServerError(f"`{shlex.join(command)}` did not end within a minute.") from None


def install(arguments: Sequence[str], run: Run = run) -> System:
    """Writes the file and starts the service; restarts it if it runs already."""
    service = system()
    text = service.text(arguments)
    if service.file.exists():
        _stop(service, run)
    service.file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(service.file, text.encode())
    try:
        _carry_out(service.start, run)
    except CommandMissing:
        service.file.unlink()
        raise
    return service


def _stop(service: System, run: Run) -> None:
    """`launchctl bootout` returns while the server still drains, and a label that is in use can't
    be loaded again."""
    for command in service.stop:
        run(command)  # fails if the service does not run
    for _ in range(STOP_LOOKS):
        if run(service.status).returncode:
            return
        time.sleep(LOOK_SECONDS)


def uninstall(run: Run = run) -> Path | None:
    """Stops the service and removes its file. Returns None if there was none."""
    service = system()
    if not service.file.exists():
        return None
    for command in service.stop:
        run(command)
    service.file.unlink()
    return service.file


def main_pid(run: Run = run) -> int:
    """Raises ServerError if the service does not run."""
    match = PID.search(run(system().pid).stdout)
    if match is None:
        raise ServerError("The service does not run. Start it with `mlx-server service install`.")
    return int(match[1])


def is_running(run: Run = run) -> bool:
    return run(system().status).returncode == 0


def _carry_out(commands: Sequence[Sequence[str]], run: Run) -> None:
    for command in commands:
        ended = run(command)
        if ended.returncode:
            output = (ended.stderr or ended.stdout).strip()
            raise ServerError(
                f"`{shlex.join(command)}` failed: {output[-500:]}. The file {system().file.name} "
                "was written; `mlx-server service uninstall` removes it."
            )
