"""Installs the suites and clients, each kind in a folder of its own in the cache directory."""

import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from mlx_server.sources.cache import cache_dir

PYDANTIC_AI = "pydantic-ai-slim[anthropic,openai]>=2.68,<3"


def _own() -> list[str]:
    """What this project depends on, but MLX, which ChatMLX does without."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    return [each for each in project["project"]["dependencies"] if not each.startswith("mlx")]


CLIENTS = (
    "llm-comply>=0.5,<0.6",
    "openai>=3.54,<4",
    "anthropic>=2.12,<3",
    "openai-agents>=0.24,<0.25",
    PYDANTIC_AI,
    "langchain-anthropic>=1,<2",
    "langchain-openai>=1.7,<2",
    "langchain-ollama>=1.1,<2",
    "langchain-tests>=1.1.9,<2",
    "langgraph>=1.2,<2",
    "ollama>=0.6.3,<1",
    "websockets>=16",
    *_own(),
)
NODE_CLIENTS = (
    "openai@7.57.0",
    "@anthropic-ai/sdk@1.14.0",
    "@openai/agents@0.20.0",
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@ai-sdk/anthropic@4.0.105",
    "ollama-ai-provider-v2@4.0.1",
    "zod@4",
)
PROBE = "llmprobe@0.6.12"
CLAUDE_CODE = "@anthropic-ai/claude-code@2.1.332"
CODEX = "@openai/codex@0.169.0"
WATSONX = "ibm-watsonx-ai==1.8.1"
MCP_SUITE = "@modelcontextprotocol/conformance@0.1.16"
NEWER_NODE = "node@22"
"""The npm package of Node.js itself: MCP's suite, the AI SDK and pi may need a newer one than this
machine's."""
OLDEST_NODE = 20

FOLDER = "conformance"


class Missing(Exception):
    """A suite or client can't be installed here. The message has the reason."""


def clients() -> Path:
    """Returns the Python that has the clients."""
    folder = cache_dir() / FOLDER / "venv"
    python = folder / "bin" / "python"
    wanted = "\n".join((sys.version, *CLIENTS))
    if not _is_there(folder, wanted):
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _install([*command, *CLIENTS], "the clients")
        _note(folder, wanted)
    return python


def node_clients() -> tuple[str, Path]:
    """Returns Node.js, and the folder whose `node_modules` has the clients."""
    folder = _package("node-clients", " ".join(NODE_CLIENTS), "the clients").parent
    return str(newer_node() / "node"), folder


def newer_node() -> Path:
    """Returns the folder with a Node.js that is new enough for all clients."""
    return programs(NEWER_NODE)


def probe() -> list[str]:
    """Returns the command that runs llmprobe."""
    node, _ = _node("llmprobe")
    folder = _package("node", PROBE, "llmprobe")
    return [node, str(folder / "llmprobe" / "bin" / "dist" / "llmprobe.mjs")]


def mcp_suite() -> list[str]:
    """Returns the command that runs MCP's conformance suite."""
    suite = _package("mcp-suite", MCP_SUITE, "MCP's suite")
    return [
        str(newer_node() / "node"),
        str(suite / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"),
    ]


def claude_code() -> list[str]:
    """Returns the command that runs Claude Code, whose own script finds the program for this
    machine."""
    node, _ = _node("Claude Code")
    folder = _package("claude-code", CLAUDE_CODE, "Claude Code")
    return [node, str(folder / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs")]


def codex() -> list[str]:
    """Returns the command that runs Codex, whose own script finds the program for this machine."""
    node, _ = _node("Codex")
    folder = _package("codex", CODEX, "Codex")
    return [node, str(folder / "@openai" / "codex" / "bin" / "codex.js")]


def own(name: str, *packages: str) -> Path:
    """Returns the Python of a folder that has the packages. Raises Missing unless they were
    installed by hand: they take long to build."""
    folder = cache_dir() / FOLDER / name
    if (python := folder / "bin" / "python").is_file():
        return python
    wanted = " ".join(f"'{package}'" for package in packages)
    make = f"python -m venv {folder} && {folder}/bin/pip install {wanted}"
    raise Missing(f"{packages[0]} is not installed: {make}")


def vllm_mlx() -> Path:
    """Returns its Python. Alone it installs an MLX without its library on Linux."""
    return own("vllm-mlx", "vllm-mlx", "mlx[cpu]")


def programs(package: str) -> Path:
    """Returns the folder with the program of a package of npm, or of PyPI if its version follows
    `==`."""
    name = package.strip("@").replace("/", "-")
    if "==" not in package:
        return _package(name, package, package, rebuilt=package.rpartition("@")[0]) / ".bin"
    folder = cache_dir() / FOLDER / name
    if not _is_there(folder, package):
        venv.create(folder, clear=True, with_pip=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _install([*command, "--disable-pip-version-check", package], package)
        _note(folder, package)
    return folder / "bin"


def _package(name: str, wanted: str, what: str, *, rebuilt: str = "") -> Path:
    """Returns the `node_modules` with this package of npm. rebuilt: the package whose install
    script runs; those of its dependencies never do."""
    _, npm = _node(what)
    folder = cache_dir() / FOLDER / name
    if not _is_there(folder, wanted):
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts"]
        _install([*command, "--prefix", str(folder), *wanted.split()], what)
        if rebuilt:
            _install([npm, "rebuild", "--silent", "--prefix", str(folder), rebuilt], what)
        _note(folder, wanted)
    return folder / "node_modules"


def _node(what: str) -> tuple[str, str]:
    """Returns Node.js and npm, which `what` needs."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        raise Missing(f"{what} needs Node.js {OLDEST_NODE} or newer, with npm")
    version = subprocess.run([node, "--version"], check=True, capture_output=True, text=True).stdout
    if int(version.strip().lstrip("v").partition(".")[0]) < OLDEST_NODE:
        raise Missing(f"{what} needs Node.js {OLDEST_NODE} or newer, and this is {version}")
    return node, npm


def _install(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{what} can't be installed: {(done.stderr or done.stdout).strip()[-500:]}")


def _is_there(folder: Path, wanted: str) -> bool:
    stamp = folder / ".installed"
    return stamp.is_file() and stamp.read_text("utf-8") == wanted


def _note(folder: Path, wanted: str) -> None:
    (folder / ".installed").write_text(wanted, "utf-8")
