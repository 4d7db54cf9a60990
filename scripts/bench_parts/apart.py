"""Runs measurements that need a process of their own, with the BLAS that the server uses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_parts.contenders import fast


def apart(module: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", module, str(folder)]
    environment = {**os.environ, **fast()}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
