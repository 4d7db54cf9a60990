"""What an answer shows besides its text: raw output, counts of tokens, names in the log."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.contract import pairs
from tests.live.server import TINY, LiveServer, eventually, serving

LOUD, QUIET, CALLER = "loud", "quiet", "caller"
HOSTILE = str(Path(__file__).parents[1] / "mcp" / "hostile.py")
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
THOUGHT, ANSWER = "<think>\nHm.\n</think>\n\n", "It is so."
END = "<|endoftext|>"
"""The stop token that a replay model of this family writes."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("asked")
    for name in pairs.KINDS:
        (folder / f"{name}.jsonl").write_text(json.dumps({"output": pairs.script(name)}))
    entries = [
        {"match": "Look!", "output": f"{THOUGHT}{CALL}"},
        {"match": "Look!", "output": f"{THOUGHT}{ANSWER}"},
        {"output": f"{THOUGHT}{ANSWER}"},
    ]
    (folder / "caller.jsonl").write_text("\n".join(map(json.dumps, entries)))
    caller = {"source": "replay:caller.jsonl", "family": "qwen3"}
    models = {
        **{name: {"source": f"replay:{name}.jsonl", "family": name} for name in pairs.KINDS},
        CALLER: {**caller, "context_length": 5000},
        LOUD: dict(caller),
        QUIET: dict(caller),
        TINY: {
            "source": str(tiny_path),
            "adapters": {"none": {"path": "./none", "description": "Says nothing."}},
        },
        "absent": {"source": "nobody/has-this"},
    }
    habits = ("quiet", "dies")
    connectors = {habit: {"command": sys.executable, "args": [HOSTILE, habit]} for habit in habits}
    with serving(folder, {"models": models, "connectors": connectors}) as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        http.timeout = httpx.Timeout(120)  # Harmony's vocabulary is made for the first request
        yield http


def body(model: str, text: str = "Well?", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def chunks(http: httpx.Client, path: str, asking: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with http.stream("POST", path, json={**asking, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def raw_of(found: Any) -> list[str]:
    return [each["text"] for each in found.get("mlx_server", {}).get("raw", [])]


@pytest.mark.parametrize("model", ["smollm3", "gpt_oss", *pairs.WITHOUT_CALLS[:1]])
def test_the_raw_output_of_any_family_on_request(http: httpx.Client, model: str) -> None:
    asking = body(model, include_raw=True)
    (whole,) = raw_of(http.post("/v1/chat/completions", json=asking).json())
    said = pairs.script(model)
    assert whole.startswith(said)
    assert 0 < len(whole) - len(said) < 40  # the token that ended it
    *_, last = chunks(http, "/v1/chat/completions", asking)
    assert raw_of(last) == [whole]
    responding = {"model": model, "input": "Well?", "include_raw": True}
    assert raw_of(http.post("/v1/responses", json=responding).json()) == [whole]
    *_, end = chunks(http, "/v1/responses", responding)
    assert raw_of(end["response"]) == [whole]
    assert "mlx_server" not in http.post("/v1/chat/completions", json=body(model)).json()


def test_the_raw_output_of_several_answers(http: httpx.Client) -> None:
    said = f"{THOUGHT}{ANSWER}{END}"
    native = http.post("/generate", json=body(LOUD, include_raw=True)).json()
    assert raw_of(native) == [said]
    asked = body(LOUD, n=2, include_raw=True)
    several = http.post("/v1/chat/completions", json=asked).json()["mlx_server"]["raw"]
    assert several == [{"index": 0, "text": said}, {"index": 1, "text": said}]


def test_what_a_model_can_do_is_listed(http: httpx.Client, client: OpenAI) -> None:
    found = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert found[CALLER]["family"] == "qwen3"
    assert found[CALLER]["context_length"] == found[CALLER]["max_model_len"] == 5000
    can = {"reasoning": True, "tools": True, "structured_output": True}
    assert found[CALLER]["capabilities"] == can
    assert found["gpt_oss"]["capabilities"] == can
    assert found["gemma3"]["capabilities"] == {**can, "reasoning": False, "tools": False}
    assert found[TINY]["capabilities"]["structured_output"] is True
    assert found[TINY]["context_length"] > 0
    unknown = dict.fromkeys(can)
    assert (found["absent"]["family"], found["absent"]["capabilities"]) == (None, unknown)
    one = client.models.retrieve(CALLER)
    assert one.to_dict()["capabilities"] == can


@pytest.mark.parametrize("name", ["adapter", "lora_path"])
@pytest.mark.parametrize(
    ("path", "asking"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/generate", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_an_adapter_by_any_name_is_never_the_bases_answer(
    http: httpx.Client, path: str, asking: dict[str, Any], name: str
) -> None:
    for model in (TINY, CALLER):
        found = http.post(path, json={**asking, "model": model, name: "/some/where"})
        assert found.status_code == 404, found.text
        assert found.json()["error"]["code"] == "adapter_not_found"
    other = "adapter_path" if name != "adapter_path" else "adapter"
    both = {**asking, "model": TINY, name: "one", other: "another"}
    assert "send only one of them" in http.post(path, json=both).json()["error"]["message"]


def test_what_is_not_served_names_what_is(http: httpx.Client) -> None:
    for path in ("/v1/moderations", "/v1/images/generations", "/v1/audio/speech"):
        error = http.post(path, json={"model": CALLER, "input": "x"}).json()["error"]
        assert f"There is no route `POST {path}`." in error["message"]
        assert "This server generates text; it serves /api/chat, " in error["message"]
        assert ", /v1/chat/completions, /v1/completions, " in error["message"]
        assert "{" not in error["message"]


def test_the_access_log_names_model_and_family(server: LiveServer, http: httpx.Client) -> None:
    wanted = [
        ("/v1/chat/completions", body(CALLER)),
        ("/v1/chat/completions", body(CALLER, include_raw="x")),
        ("/v1/chat/completions", body(CALLER, logit_bias={"99999": 1})),
        ("/v1/responses", {"model": "gpt_oss", "input": "x"}),
    ]
    for number, (path, asked) in enumerate(wanted):
        http.post(path, json=asked, headers={"x-request-id": f"named-{number}"})

    def lines() -> list[str]:
        logged = [line for line in server.log.splitlines() if "mlx_server.access" in line]
        named = [line for line in logged if " named-" in line]
        return sorted(named, key=lambda line: line.rpartition("-")[2])

    eventually(lambda: len(lines()) == len(wanted), "all of them are logged")
    named = [re.search(r"\d tokens(?:, (\S+) \((\S+)\))?", line) for line in lines()]
    assert [found and found.groups() for found in named] == [
        (CALLER, "qwen3"),
        (None, None),
        (CALLER, "qwen3"),
        ("gpt_oss", "gpt_oss"),
    ]


def count(server: LiveServer, name: str, labels: str) -> float:
    with server.http() as http:
        exposition = http.get("/metrics").text
    found = re.search(rf"^{name}_total\{{{labels}\}} (\S+)$", exposition, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_tool_outputs_of_clients_are_counted_once(server: LiveServer, http: httpx.Client) -> None:
    labels = f'model="{LOUD}"'
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asking = body(LOUD, "Look!", tools=[TOOL])
    asking["messages"] += [
        {"role": "assistant", "tool_calls": [call, {**call, "id": "d"}]},
        {"role": "tool", "tool_call_id": "c", "content": "12345"},
        {"role": "tool", "tool_call_id": "d", "content": "123"},
    ]
    usage = http.post("/v1/chat/completions", json=asking).json()["usage"]
    assert usage["prompt_tokens_details"]["tool_output_tokens"] == 8
    assert count(server, "mlx_server_tool_output_tokens", labels) == 8
    asking["messages"] += [
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "And now?"},
    ]
    usage = http.post("/v1/chat/completions", json=asking).json()["usage"]
    assert "tool_output_tokens" not in usage["prompt_tokens_details"]
    assert count(server, "mlx_server_tool_output_tokens", labels) == 8


def looking(connector: str) -> dict[str, Any]:
    tool = {"type": "mcp", "server_label": "eye", "connector_id": connector}
    return {"model": CALLER, "input": "Look!", "tools": [{**tool, "require_approval": "never"}]}


def test_tool_outputs_of_mcp_servers_are_counted(server: LiveServer, http: httpx.Client) -> None:
    calls = f'model="{CALLER}",outcome="completed"'
    before = count(server, "mlx_server_tool_output_tokens", f'model="{CALLER}"')
    made = count(server, "mlx_server_mcp_calls", calls)
    found = http.post("/v1/responses", json={**looking("quiet"), "include_raw": True}).json()
    assert found["usage"]["output_tokens_details"]["tool_output_tokens"] == len("seen")
    after = count(server, "mlx_server_tool_output_tokens", f'model="{CALLER}"')
    assert after - before == len("seen")
    assert count(server, "mlx_server_mcp_calls", calls) == made + 1
    assert raw_of(found) == [f"{THOUGHT}{CALL}{END}", f"{THOUGHT}{ANSWER}{END}"]


def test_an_mcp_call_that_fails_is_logged_and_counted(
    server: LiveServer, http: httpx.Client
) -> None:
    before = len(server.log)
    found = http.post("/v1/responses", json=looking("dies")).json()
    assert found["status"] == "completed"
    (call,) = [item for item in found["output"] if item["type"] == "mcp_call"]
    assert call["error"]
    assert count(server, "mlx_server_mcp_calls", f'model="{CALLER}",outcome="failed"') == 1
    assert (
        "WARNING mlx_server.mcp: a call of an MCP tool failed (ConnectionLost)"
        in (server.log[before:])
    )
