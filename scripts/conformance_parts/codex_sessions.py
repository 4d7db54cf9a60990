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
"""The model of Codex's list whose name the replay models have."""
CONTEXT = 200_000
SECONDS = 600.0
MCP_SERVER = Path(__file__).parent / "conversations" / "mcp_weather.py"
PATCH = "*** Begin Patch\n*** Update File: a.txt\n@@\n-content of a\n+CONTENT of a\n*** End Patch"
CALLS: list[tuple[str, str, dict[str, str]]] = [
    ("I look at it.", "exec_command", {"cmd": "cat a.txt"}),
    ("I change it.", "apply_patch", {"input": PATCH}),
    ("I need the weather.", "tool_search", {"query": "weather in a city"}),
    ("Here it is.", "mcp__weather.get_weather", {"city": "Chur"}),
]
TO_DELEGATE, DELEGATED = "Ask an agent for the file b.txt.", "Make the file b.txt."
"""The prompt of the user, and the prompt of the model to its sub-agent."""
MADE, REPORTED = "The agent made it.", "Good."
"""The model's last message. The second one is for a report of the agent that comes before the file
was seen: Codex adds that report as a user's message."""
WAIT = "until [ -f b.txt ]; do sleep 0.1; done"

Json = dict[str, Any]


def transcript(family: str) -> Iterator[Json]:
    """Yields what a model plays, in turn, and what its sub-agent plays."""
    call, say = (_call, _say) if family == "gpt_oss" else (_tags_call, _tags_say)
    search, spawn = {"query": "spawn a sub-agent"}, {"message": DELEGATED}
    make = {"cmd": "printf made > b.txt"}
    for output in (call("A file.", "exec_command", make), say("It is made.", "I made it.")):
        yield {"match": f"regex:{DELEGATED}", "output": output}
    for output in (
        call("Who can do it?", "tool_search", search),
        call("Another does it.", "multi_agent_v1.spawn_agent", spawn),
        call("I wait.", "exec_command", {"cmd": WAIT}),
        say("It is there.", MADE),
    ):
        yield {"match": f"regex:{TO_DELEGATE}", "output": output}
    for thought, name, arguments in CALLS:
        yield {"output": call(thought, name, arguments)}
    yield {"output": say("Done.", "Changed, at 21 degrees.")}
    yield {"output": say("Again.", "Nothing to do.")}
    yield {"output": say("The agent reports.", REPORTED)}


def _call(thought: str, name: str, arguments: Json) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{_harmony(thought)}{header}{json.dumps(arguments)}<|call|>"


def _say(thought: str, text: str) -> str:
    return f"{_harmony(thought)}<|channel|>final<|message|>{text}<|return|>"


def _harmony(thought: str) -> str:
    return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"


def _tags_call(thought: str, name: str, arguments: Json) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{_tags_say(thought, '')}<tool_call>\n{call}\n</tool_call>"


def _tags_say(thought: str, text: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{text}"


@dataclass(frozen=True)
class Codex:
    program: list[str]
    home: Path
    work: Path

    def __call__(self, model: str, *prompt: str) -> list[Json]:
        """Returns the events of a session that ends by itself."""
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

    def delegated() -> None:
        events = codex(model, TO_DELEGATE)
        said = [each["text"] for each in items(events, "agent_message")]
        assert said[-1] in (MADE, REPORTED), events
        made = codex.work / "b.txt"
        assert made.read_text("utf-8") == "made"
        made.unlink()

    yield f"{model}: a command, a patch, a tool that is searched, thoughts", tools
    yield f"{model}: resume", resumed
    yield f"{model}: a sub-agent", delegated


def main(program: list[str]) -> None:
    raise_loopback()
    with TemporaryDirectory() as name:
        folder = Path(name)
        codex = Codex(program, folder / "home", folder / "work")
        codex.home.mkdir()
        codex.work.mkdir()
        for model, family in FAMILIES.items():
            text = "\n".join(map(json.dumps, transcript(family)))
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
