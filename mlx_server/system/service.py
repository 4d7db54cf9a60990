"""`mlx-server service`: a server that the system starts with the user's session, and again.

On a Mac it is a LaunchAgent, on Linux a user unit of systemd. The files are made here as text;
`launchctl` and `systemctl` do the rest.
"""

import os
import plistlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_server.errors import ServerError, SettingsError

LABEL = "local.mlx-server"
UNIT = "mlx-server.service"

DESCRIPTORS = 8192
"""The soft limit of open files: launchd's own is 256."""

SERVE = (sys.executable, "-m", "mlx_server", "serve")

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class System:
    """How this operating system keeps a user's services."""

    file: Path
    text: Callable[[Sequence[str]], str]
    start: tuple[tuple[str, ...], ...]
    """Commands that take the file up and start the service, also where an older one runs."""
    stop: tuple[tuple[str, ...], ...]
    status: tuple[str, ...]
    """It exits with 0 where the service runs."""
    log: str
    """How to read what the server has written, for people."""


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
        log=f"tail -f {_mac_log()}",
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
        log=f"journalctl --user -u {UNIT} -f",
    )


def _mac_log() -> Path:
    return Path.home() / "Library/Logs/mlx-server/server.log"


def launch_agent(arguments: Sequence[str]) -> str:
    """arguments: those of `mlx-server serve`."""
    described = {
        "Label": LABEL,
        # launchd rotates no logs, so the server does
        "ProgramArguments": [*SERVE, *arguments, "--log-file", str(_mac_log())],
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ProcessType": "Interactive",  # others are slowed down by macOS
        "ExitTimeOut": 30,
        "SoftResourceLimits": {"NumberOfFiles": DESCRIPTORS},
        "HardResourceLimits": {"NumberOfFiles": DESCRIPTORS},
        "WorkingDirectory": str(Path.home()),
        "EnvironmentVariables": {"PATH": os.environ.get("PATH", os.defpath)},
    }
    return plistlib.dumps(described, sort_keys=False).decode()


def systemd_unit(arguments: Sequence[str]) -> str:
    """arguments: those of `mlx-server serve`."""
    command = " ".join(_quoted(word) for word in (*SERVE, *arguments))
    return (
        "[Unit]\n"
        "Description=mlx-server, a local inference server\n"
        "\n"
        "[Service]\n"
        f"ExecStart={command}\n"
        "WorkingDirectory=%h\n"
        f"Environment={_quoted('PATH=' + os.environ.get('PATH', os.defpath))}\n"
        "Restart=on-failure\n"
        "RestartSec=10\n"
        # wrong settings stay wrong
        "RestartPreventExitStatus=2\n"
        "TimeoutStopSec=30\n"
        f"LimitNOFILE={DESCRIPTORS}\n"
        "\n"
        "[Install]\n"
        "WantedBy=default.target\n"
    )


def _quoted(word: str) -> str:
    """As systemd.service(5) reads a command line: `%` and `$` are doubled, quotes are C's."""
    if any(not c.isprintable() for c in word):
        raise SettingsError(f"{word!r} has a character that no unit of systemd can have.")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise ServerError(
            f"There is no {command[0]} here, so no service can be kept. Start `mlx-server serve` "
            "in a way of this system's own."
        ) from None
    except subprocess.TimeoutExpired:
        raise ServerError(f"`{shlex.join(command)}` did not end within a minute.") from None


def install(arguments: Sequence[str], run: Run = run) -> System:
    """Writes the file and starts the service; one that runs already is started anew."""
    found = system()
    text = found.text(arguments)
    if found.file.exists():
        for command in found.stop:
            run(command)  # it fails where the service does not run
    found.file.parent.mkdir(parents=True, exist_ok=True)
    found.file.write_text(text, "utf-8")
    found.file.chmod(0o600)
    _carry_out(found.start, run)
    return found


def uninstall(run: Run = run) -> Path | None:
    """Stops the service and removes its file; None: there was none."""
    found = system()
    if not found.file.exists():
        return None
    for command in found.stop:
        run(command)
    found.file.unlink()
    return found.file


def is_running(run: Run = run) -> bool:
    return run(system().status).returncode == 0


def _carry_out(commands: Sequence[Sequence[str]], run: Run) -> None:
    for command in commands:
        ended = run(command)
        if ended.returncode:
            said = (ended.stderr or ended.stdout).strip()
            raise ServerError(
                f"`{shlex.join(command)}` failed: {said[-500:]}. The file {system().file.name} is "
                "written; `mlx-server service uninstall` removes it."
            )
