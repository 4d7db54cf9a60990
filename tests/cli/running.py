"""Commands in processes of their own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_server", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
