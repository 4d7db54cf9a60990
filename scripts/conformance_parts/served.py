"""The tested server: it has the demo model, and models that play what two families write.

A replay model plays its answers in turn, so every conversation has a model to itself.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance_parts.conversations.weather import CONNECTOR, MOST, model_of
from conformance_parts.langchain import ANSWERS, MODEL
from tests.live.server import DEMO, LiveServer, serving

MCP_SERVER = Path(__file__).parent / "conversations" / "mcp_weather.py"

DEMO_MODEL = {
    "source": "demo:smollm2",
    "preload": True,
    # the small model would write for ever; the suites rarely limit the length of an answer
    "defaults": {"temperature": 0, "max_tokens": 512},
}

THINKER = "gpt-5-replay"
"""The name by which llm-comply takes it for a reasoning model."""


def _tags(thought: str, text: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{text}"


def _tags_calls(*cities: str) -> str:
    calls = ({"name": "get_weather", "arguments": {"city": city}} for city in cities)
    texts = (json.dumps(call, ensure_ascii=False) for call in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def _harmony(thought: str, text: str) -> str:
    return (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        f"<|channel|>final<|message|>{text}<|return|>"
    )


def _harmony_call(city: str, preamble: str = "") -> str:
    before = f"<|channel|>commentary<|message|>{preamble}<|end|><|start|>assistant"
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    return (
        "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant"
        f"{before if preamble else ''}<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{arguments}<|call|>"
    )


TRANSCRIPTS = {
    "qwen3": (
        _tags("Two cities, two calls.", _tags_calls("Zürich", "Bern")),
        _tags("Now I know.", "Zürich has 18 degrees, Bern has 16."),
        _tags("One more.", _tags_calls("Chur")),
        _tags("Now I know.", "Chur has 21 degrees."),
    ),
    "gpt_oss": (
        _harmony_call("Zürich", "I look it up."),
        _harmony_call("Bern"),
        _harmony("Now I know.", "Zürich has 18 degrees, Bern has 16."),
        _harmony_call("Chur"),
        _harmony("Now I know.", "Chur has 21 degrees."),
    ),
}


@contextmanager
def server(clients: Iterable[str]) -> Iterator[LiveServer]:
    with TemporaryDirectory() as folder:
        for family, outputs in TRANSCRIPTS.items():
            _write(Path(folder) / f"{family}.jsonl", outputs)
        _write(Path(folder) / "thinker.jsonl", [_harmony("Ten times 37, and half of it.", "555.")])
        _add_call(Path(folder) / "thinker.jsonl")
        with serving(Path(folder), _config(clients)) as found:
            yield found


@contextmanager
def forwarding(clients: Iterable[str]) -> Iterator[LiveServer]:
    """Yields a second server, which has the first one as the upstream of every model."""
    config = _config(clients)
    with server(clients) as there, TemporaryDirectory() as folder:
        models = {
            name: {
                "source": f"openai+{there.url}/v1",
                "upstream_model": name,
                "family": model.get("family", "plain"),
                "defaults": model.get("defaults", {}),
            }
            for name, model in config["models"].items()
        }
        with serving(Path(folder), {**config, "models": models}) as found:
            yield found


def _add_call(transcript: Path) -> None:
    """Adds what the model says if it has llm-comply's tool, which it must call."""
    call = {"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}
    entry = {"tools": ["get_weather"], "answer": {"calls": [call]}}
    transcript.write_text(f"{transcript.read_text('utf-8')}\n{json.dumps(entry)}", "utf-8")


def _write(path: Path, outputs: Iterable[str]) -> None:
    path.write_text("\n".join(json.dumps({"output": output}) for output in outputs), "utf-8")


def _config(clients: Iterable[str]) -> dict[str, Any]:
    talkers = {
        model_of(family, client, number): {
            "source": f"replay:{family}.jsonl",
            "family": family,
            "ttl": 10,
        }
        for family in TRANSCRIPTS
        for client in clients
        for number in range(MOST)
    }
    suite = {"source": f"replay:{ANSWERS}", "family": "qwen3"}
    thinker = {"source": "replay:thinker.jsonl", "family": "gpt_oss"}
    weather = {"command": sys.executable, "args": [str(MCP_SERVER)]}
    return {
        "models": {DEMO: DEMO_MODEL, THINKER: thinker, MODEL: suite, **talkers},
        "connectors": {CONNECTOR: weather},
    }
