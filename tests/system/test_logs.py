"""A line of the log is one line, whatever it says."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.errors import SettingsError
from mlx_server.system.logs import write_to

WRITER = """
import subprocess, sys
from pathlib import Path
from mlx_server.system.logs import write_to

write_to(Path(sys.argv[1]), rotate_bytes=2000)
for number in range(2000):
    print(f"line {number:04}")
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "print('from the child')"])
sys.stderr.write("the last words")
"""


def test_nothing_is_lost_and_old_lines_go_first(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    ended = subprocess.run([sys.executable, "-c", WRITER, str(log)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    files = [log, *(log.with_name(f"server.log.{n}") for n in range(1, limits.LOG_FILES + 1))]
    assert sorted(path.name for path in log.parent.iterdir()) == sorted(f.name for f in files)
    lines = [line for file in reversed(files) for line in file.read_text().splitlines()]
    assert sorted(lines[-2:]) == ["from the child", "the last words"]
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert numbers == list(range(numbers[0], 2000))
    assert numbers[0] > 0
    assert all(file.stat().st_size < 70_000 for file in files)


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="--log-file"):
        write_to(tmp_path / "file" / "server.log")


@pytest.mark.slow
def test_wrong_settings_are_said_in_the_terminal_and_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("modles: {}\n")
    command = [sys.executable, "-m", "mlx_server", "serve", "--log-file", "server.log"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "modles" in ended.stderr
    assert "modles" in (tmp_path / "server.log").read_text()


LOADING = """
import logging
from mlx_server.pool.models import progress_display
from mlx_server.system.logs import configure

configure("info", "text")
progress = progress_display()
for model in ("one", "two"):
    progress(model, "loading", 0, 2)
print("Listening on http://127.0.0.1:8000", flush=True)
logging.getLogger("mlx_server").info("it loads")
for model in ("one", "two"):
    progress(model, "loading", 2, 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_piped", [False, True])
def test_what_is_said_next_to_a_progress_bar_stays(is_piped: bool) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", LOADING],
        stdout=subprocess.PIPE if is_piped else theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    ) as child:
        os.close(theirs)
        screen = shown(read_to_end(ours))
        piped = child.stdout.read().decode() if child.stdout else ""
    listening = piped.strip() if is_piped else screen.pop(0)
    assert listening == "Listening on http://127.0.0.1:8000"
    assert [line.partition("mlx_server: ")[2] for line in screen] == ["it loads"]


def read_to_end(terminal: int) -> str:
    with open(terminal, "rb", buffering=0) as file:
        output = b""
        while True:
            try:
                output += file.read(1 << 16)
            except OSError:  # Linux's end of a terminal
                return output.decode()


def shown(output: str) -> list[str]:
    """The lines that a terminal has in the end."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.endswith("A"):
            row -= int(part[2:-1])
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line for line in lines if line.strip()]
