"""The suites and clients, each kind in a folder of its own in the cache directory."""

import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from mlx_server.sources.cache import cache_dir

CLIENTS = (
    "llm-comply>=0.5,<0.6",
    "openai>=3.54,<4",
    "openai-agents>=0.24,<0.25",
    "pydantic-ai-slim[openai]>=2.68,<3",
    "langchain-openai>=1.7,<2",
    "websockets>=16",
)
PROBE = "llmprobe@0.6.12"
OLDEST_NODE = 20

FOLDER = "conformance"


class Missing(Exception):
    """It can't be had here, and why."""


def clients() -> Path:
    """The Python that has them."""
    folder = cache_dir() / FOLDER / "venv"
    python = folder / "bin" / "python"
    wanted = "\n".join((sys.version, *CLIENTS))
    if not _is_there(folder, wanted):
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _install([*command, *CLIENTS], "the clients")
        _note(folder, wanted)
    return python


def probe() -> list[str]:
    """The command that runs llmprobe."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        raise Missing(f"llmprobe needs Node.js {OLDEST_NODE} or newer, with npm")
    version = subprocess.run([node, "--version"], check=True, capture_output=True, text=True).stdout
    if int(version.strip().lstrip("v").partition(".")[0]) < OLDEST_NODE:
        raise Missing(f"llmprobe needs Node.js {OLDEST_NODE} or newer, and this is {version}")
    folder = cache_dir() / FOLDER / "node"
    if not _is_there(folder, PROBE):
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts"]
        _install([*command, "--prefix", str(folder), PROBE], "llmprobe")
        _note(folder, PROBE)
    return [node, str(folder / "node_modules" / "llmprobe" / "bin" / "dist" / "llmprobe.mjs")]


def _install(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{what} can't be installed: {(done.stderr or done.stdout).strip()[-500:]}")


def _is_there(folder: Path, wanted: str) -> bool:
    stamp = folder / ".installed"
    return stamp.is_file() and stamp.read_text("utf-8") == wanted


def _note(folder: Path, wanted: str) -> None:
    (folder / ".installed").write_text(wanted, "utf-8")
