"""A line of the log is one line, whatever it says."""

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
