"""Runs clients that `mlx-server connect` supports, unchanged, each in a network without a way
out."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from tempfile import TemporaryFile

from conformance_parts import installed, namespaces
from conformance_parts.outcomes import Outcome, Verdict

SUITE = "connected"


@dataclass(frozen=True)
class Agent:
    package: str
    """The client's package of npm, or of PyPI if it has `==`, with its version."""
    arguments: tuple[str, ...]
    """The arguments with which the program answers one prompt."""
    continues: tuple[str, ...] | None = None
    """The arguments with which it answers in its last conversation; None for cline, which does that
    only at a terminal."""
    call: tuple[str, Mapping[str, str]] | None = None
    """The tool with which it writes a file; None for aider, which reads the file out of the
    text."""
    extra: tuple[str, ...] = ()
    """Further arguments that give the client this tool."""
    unrepeated: int = 64
    """The most tokens at the end of a prompt that the next one does not repeat, for example those
    of an instruction to answer."""
    overflow: str = "maximum context length"
    """What the client prints if a prompt exceeds the context."""
    reported: tuple[str, ...] = ()
    """Further arguments with which it prints that."""
    is_interrupted: bool = True
    """Whether Ctrl-C ends the request that runs; OpenHands waits for its answer."""
    adds_context: bool = False
    """Whether it sends a message of its own after a tool's result, which the model answers."""
    node: str = installed.NEWER_NODE
    """The npm package of the Node.js that it needs."""


CODEX = ("--profile", "mlx-server", "exec", "--skip-git-repo-check")
UNCONFINED = "--dangerously-bypass-approvals-and-sandbox"
"""Turns Codex's own sandbox off: it needs namespaces within those that it runs in here."""

AIDER = ("--no-git", "--yes-always", "--no-pretty", "--restore-chat-history", "--message")

OPENCLAW = ("agent", "--local", "--session-id", "one", "--message", "{prompt}")

OPENHANDS = ("--headless", "--override-with-envs")

LLM_TOOL = """
def write_file(path: str, content: str) -> str:
    "Writes a file."
    with open(path, "w") as file:
        file.write(content)
    return "Written."
"""

AGENTS: Mapping[str, Agent] = {
    "llm": Agent(
        "llm==0.36",
        ("-m", "mlx-server", "{prompt}"),
        ("-m", "mlx-server", "-c", "{prompt}"),
        ("write_file", {"path": "{file}", "content": "{content}"}),
        ("--functions", LLM_TOOL),
    ),
    "pi": Agent(
        "@earendil-works/pi-coding-agent@1.3.0",
        ("--provider", "mlx-server", "--model", "{model}", "-p", "{prompt}"),
        ("--provider", "mlx-server", "--model", "{model}", "--continue", "-p", "{prompt}"),
        ("write", {"path": "{file}", "content": "{content}"}),
        overflow='"type":"context_edit"',  # it removes the answer, to shorten the conversation
        reported=("--mode", "json"),
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code@0.24.4",
        ("--yolo", "-p", "{prompt}"),
        ("--yolo", "--continue", "-p", "{prompt}"),
        ("write_file", {"file_path": "{file}", "content": "{content}"}),
        overflow="Context is too large to send safely",
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        ("run", "{prompt}"),
        ("run", "--continue", "{prompt}"),
        ("write", {"filePath": "{file}", "content": "{content}"}),
    ),
    "codex": Agent(
        "@openai/codex@0.169.0",
        (*CODEX, "{prompt}"),
        (*CODEX, "resume", "--last", "{prompt}"),
        ("exec_command", {"cmd": "printf '{content}' > {file}"}),
        (UNCONFINED,),
        overflow="ran out of room in the model's context window",
    ),
    "cline": Agent(
        "cline@3.0.65",
        ("{prompt}",),
        call=("editor", {"path": "{file}", "new_text": "{content}"}),
    ),
    "continue": Agent(
        "@continuedev/cli@1.5.47",
        ("--auto", "-p", "{prompt}"),
        ("--auto", "--resume", "-p", "{prompt}"),
        ("Write", {"filepath": "{file}", "content": "{content}"}),
        overflow="Context length exceeded",
    ),
    "aider": Agent(
        "aider-chat==0.86.2",
        (*AIDER, "{prompt}"),
        (*AIDER, "{prompt}"),
        unrepeated=1_100,  # its rules for edits follow the last question only
        overflow="has hit a token limit",
    ),
    "kilo-code": Agent(
        "@kilocode/cli@7.7.7",
        ("run", "--auto", "{prompt}"),
        ("run", "--auto", "--continue", "{prompt}"),
        ("write", {"filePath": "{file}", "content": "{content}"}),
        unrepeated=256,  # what it says of the surroundings follows the last question only
    ),
    "copilot-cli": Agent(
        "@github/copilot@1.0.102",
        ("--allow-all-tools", "-p", "{prompt}"),
        ("--allow-all-tools", "--continue", "-p", "{prompt}"),
        ("create", {"path": "{file}", "file_text": "{content}"}),
        unrepeated=128,
        overflow="exceed the model's usable context budget",
    ),
    "droid": Agent(
        "droid@0.215.0",
        ("exec", "--auto", "low", "-m", "custom:{model}-(mlx-server)-0", "{prompt}"),
        None,
        ("Create", {"file_path": "{file}", "content": "{content}"}),
        overflow="Exec failed",  # it says no more of any error
    ),
    "hermes": Agent(
        "hermes-agent==0.19.0",
        ("-z", "{prompt}"),
        ("--continue", "-z", "{prompt}"),
        ("write_file", {"path": "{file}", "content": "{content}"}),
        overflow="below the minimum 64,000 required",
    ),
    "kimi-code": Agent(
        "@moonshot-ai/kimi-code@2.1.0",
        ("-p", "{prompt}"),
        ("--continue", "-p", "{prompt}"),
        ("Write", {"path": "{file}", "content": "{content}"}),
        unrepeated=700,  # a reminder of its mode follows each question
    ),
    "openclaw": Agent(
        "openclaw@2026.9.6",
        OPENCLAW,
        OPENCLAW,
        ("write", {"path": "{file}", "content": "{content}"}),
        unrepeated=700,  # what it says of processes follows the last message only
        overflow="Model context window too small",
        adds_context=True,
        node="node@24",
    ),
    "openhands": Agent(
        "openhands==1.16.0",
        (*OPENHANDS, "-t", "{prompt}"),
        (*OPENHANDS, "--resume", "--last", "-t", "{prompt}"),
        (
            "file_editor",
            {
                "command": "create",
                "path": "{file}",
                "file_text": "{content}",
                "security_risk": "LOW",
                "summary": "Writes the file",
            },
        ),
        overflow="Hard context reset",  # it tries to shorten the conversation
        is_interrupted=False,
    ),
}


def agents() -> Iterator[Outcome]:
    for name, agent in AGENTS.items():
        yield from _agent(name, agent)


def _agent(name: str, agent: Agent) -> Iterator[Outcome]:
    try:
        folder = installed.programs(agent.package)
        command = [*namespaces.alone(), sys.executable, "-m", "conformance_parts.agent_sessions"]
        environment = {
            **os.environ,
            "PATH": f"{installed.programs(agent.node)}:{os.environ['PATH']}",
        }
    except installed.Missing as missing:
        yield Outcome(SUITE, name, "all sessions", "skipped", (str(missing),))
        return
    with TemporaryFile("w+") as errors:
        done = subprocess.run(
            [*command, name, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        for line in done.stdout.splitlines():
            test, error = json.loads(line)
            verdict: Verdict = "failed" if error else "passed"
            yield Outcome(SUITE, agent.package, test, verdict, (error,))
        if done.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["nothing was said"])[-1]
            yield Outcome(SUITE, name, "all sessions", "failed", (last,))
