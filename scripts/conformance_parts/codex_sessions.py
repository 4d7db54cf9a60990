"""`python -m conformance_parts.codex_sessions COMMAND...`, in a network of its own.

It prints a line of JSON, a name and an error, for each session of Codex with replay models. What
Codex knows of a model comes from its own list: a replay model is one of them by another name.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance_parts.namespaces import raise_loopback
from conformance_parts.recorder import recorded
from tests.live.server import LiveServer, serving

FAMILIES = {"harmony": "gpt_oss", "tags": "qwen3"}
LIKE = "gpt-5.5"
"""The model of Codex' list that the replay models are taken for."""
CONTEXT = 200_000
SECONDS = 180.0
MCP_SERVER = Path(__file__).parent / "conversations" / "mcp_weather.py"
PATCH = "*** Begin Patch\n*** Update File: a.txt\n@@\n-content of a\n+CONTENT of a\n*** End Patch"
CALLS: list[tuple[str, str, dict[str, str]]] = [
    ("I look at it.", "exec_command", {"cmd": "cat a.txt"}),
    ("I change it.", "apply_patch", {"input": PATCH}),
    ("I need the weather.", "tool_search", {"query": "weather in a city"}),
    ("Here it is.", "mcp__weather.get_weather", {"city": "Chur"}),
]

Json = dict[str, Any]


def outputs(family: str) -> Iterator[str]:
    """What a model plays, in turn."""
    for thought, name, arguments in CALLS:
        written = json.dumps(arguments)
        if family == "gpt_oss":
            header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            yield _harmony(thought) + f"{header}{written}<|call|>"
        else:
            call = f'{{"name": "{name}", "arguments": {written}}}'
            yield f"<think>\n{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    for thought, text in (("Done.", "Changed, at 21 degrees."), ("Again.", "Nothing to do.")):
        if family == "gpt_oss":
            yield _harmony(thought) + f"<|channel|>final<|message|>{text}<|return|>"
        else:
            yield f"<think>\n{thought}\n</think>\n\n{text}"


def _harmony(thought: str) -> str:
    return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"


@dataclass(frozen=True)
class Codex:
    program: list[str]
    home: Path
    work: Path

    def __call__(self, model: str, *prompt: str) -> list[Json]:
        """The events of a session that ends by itself."""
        reported = ("--json", "--skip-git-repo-check", "--model", model)
        free = ("--dangerously-bypass-approvals-and-sandbox",)
        lines = self._run("exec", *reported, *free, *prompt).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def configure(self, server: LiveServer) -> None:
        known = json.loads(self._run("debug", "models"))["models"]
        (like,) = (each for each in known if each["slug"] == LIKE)
        ours = {"base_instructions": "You code.", "context_window": CONTEXT}
        models = [{**like, **ours, "slug": name} for name in FAMILIES]
        (self.home / "models.json").write_text(json.dumps({"models": models}), "utf-8")
        (self.home / "config.toml").write_text(self._config(server), "utf-8")

    def _config(self, server: LiveServer) -> str:
        return f"""
model_provider = "local"
model_reasoning_summary = "auto"
model_catalog_json = {json.dumps(str(self.home / "models.json"))}
[model_providers.local]
name = "local"
base_url = "{server.url}/v1"
wire_api = "responses"
[mcp_servers.weather]
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(MCP_SERVER))}]
default_tools_approval_mode = "approve"
required = true
startup_timeout_sec = 60
"""

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.program, *arguments],
            cwd=self.work,
            env={**os.environ, "HOME": str(self.home), "CODEX_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{done.stderr[-300:]}{done.stdout[-500:]}"
        return done.stdout


def items(events: list[Json], kind: str) -> list[Json]:
    found = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in found if item["type"] == kind]


def sessions(codex: Codex, model: str) -> Iterator[tuple[str, Callable[[], None]]]:
    file = codex.work / "a.txt"

    def tools() -> None:
        file.write_text("content of a\n", "utf-8")
        events = codex(model, "Change a.txt, and say how warm it is in Chur.")
        assert items(events, "agent_message")[-1]["text"] == "Changed, at 21 degrees.", events
        assert file.read_text("utf-8") == "CONTENT of a\n"
        (command,) = items(events, "command_execution")
        assert command["aggregated_output"] == "content of a\n", command
        assert [each["status"] for each in items(events, "file_change")] == ["completed"], events
        (weather,) = items(events, "mcp_tool_call")
        assert "21 degrees" in json.dumps(weather["result"]), weather
        thoughts = [each["text"] for each in items(events, "reasoning")]
        assert thoughts == [*(thought for thought, _, _ in CALLS), "Done."], thoughts

    def resumed() -> None:
        events = codex(model, "resume", "--last", "And again?")
        assert items(events, "agent_message")[-1]["text"] == "Nothing to do.", events

    yield f"{model}: a command, a patch, a tool that is searched, thoughts", tools
    yield f"{model}: resume", resumed


def main(program: list[str]) -> None:
    raise_loopback()
    with TemporaryDirectory() as name:
        folder = Path(name)
        codex = Codex(program, folder / "home", folder / "work")
        codex.home.mkdir()
        codex.work.mkdir()
        for model, family in FAMILIES.items():
            text = "\n".join(json.dumps({"output": output}) for output in outputs(family))
            (folder / f"{model}.jsonl").write_text(text, "utf-8")
        models = {
            model: {"source": f"replay:{model}.jsonl", "family": family, "context_length": CONTEXT}
            for model, family in FAMILIES.items()
        }
        with serving(folder, {"models": models}) as started, recorded(started, "codex") as server:
            codex.configure(server)
            for model in FAMILIES:
                for title, session in sessions(codex, model):
                    sys.stdout.write(json.dumps([title, _error(session)]) + "\n")
                    sys.stdout.flush()


def _error(session: Callable[[], None]) -> str:
    try:
        session()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
