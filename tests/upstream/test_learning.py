"""What an upstream says of its model is learnt, unless the owner has said otherwise."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.upstream import connection
from mlx_server.upstream.dialects import LearntFacts, facts_in
from tests.tables import cases
from tests.upstream.failing import NOWHERE
from tests.upstream.playing import (
    CALL_JSON,
    PARIS,
    WEATHER,
    PlayingServer,
    Reply,
    answered,
    chat,
    gateway,
    in_one,
    says,
    whole,
)

OPENROUTER = {
    "id": "there",
    "context_length": 131072,
    "supported_parameters": ["tools", "stop", "top_k", "seed", "reasoning", "logprobs"],
}
VLLM = {"id": "there", "owned_by": "vllm", "max_model_len": 4096}


@pytest.fixture
def models(upstream: PlayingServer) -> Iterator[Callable[[Reply], None]]:
    """Says what the upstream answers to GET /v1/models."""
    before = upstream.models

    def play(reply: Reply) -> None:
        upstream.models = reply

    yield play
    upstream.models = before


def listing(*entries: Any) -> Reply:
    return whole({"object": "list", "data": list(entries)})


def until(found: Callable[[], bool]) -> None:
    while not found():
        time.sleep(0.01)


def shown(client: TestClient, id: str = "up") -> Any:
    return next(e for e in client.get("/v1/models").json()["data"] if e["id"] == id)


def test_context_and_parameters(models: Callable[[Reply], None], upstream: PlayingServer) -> None:
    models(listing({"id": "other", "context_length": 5}, OPENROUTER))
    stated = {"upstream_model": "there", "capabilities": {"seed": False}}
    with gateway(upstream.url, {"up": {"upstream_model": "there"}, "own": stated}) as client:
        until(lambda: all(shown(client, id)["context_length"] == 131072 for id in ("up", "own")))
        upstream.plays(says("Yes"))
        assert chat(client, top_k=5).json()["error"]["param"] == "top_k"
        assert chat(client, logprobs=True).json()["error"]["param"] == "logprobs"
        assert answered(client, seed=1)
        assert chat(client, model="own", seed=1).json()["error"]["param"] == "seed"


def test_a_model_that_turns_out_to_have_no_tools(
    models: Callable[[Reply], None], upstream: PlayingServer
) -> None:
    models(listing({**OPENROUTER, "supported_parameters": ["temperature"]}))
    with gateway(upstream.url, {"up": {"upstream_model": "there"}}) as client:
        until(lambda: shown(client)["context_length"] is not None)
        upstream.plays(says(f"<tool_call>\n{CALL_JSON}\n</tool_call>"))
        assert in_one(client, {"tools": [WEATHER]})["calls"] == [PARIS]
        assert "tools" not in upstream.bodies[0]


@cases
def test_servers_by_their_name(entry: Any, context: int | None, can: list[str]) -> None:
    found = facts_in({"data": [entry]}, "there")
    assert found.context_length == context
    assert sorted(name for name, has in found.capabilities.items() if has) == can


@pytest.mark.parametrize(
    "wrong",
    [None, 5, [], {}, {"data": 5}, {"data": [5]}, {"data": [{}]}, {"data": [{"id": "b"}] * 2}],
)
def test_what_says_nothing(wrong: Any) -> None:
    assert facts_in(wrong, "there") == LearntFacts()


@pytest.mark.parametrize("wrong", [5, "text", None, True, {"a": []}, [None], -1, 2**70])
def test_wrong_types(wrong: Any) -> None:
    names = (
        *("owned_by", "supported_parameters", "capabilities", "meta", "context_length"),
        *("architecture", "input_modalities", "type"),
    )
    found = facts_in({"data": [{"id": "there", **dict.fromkeys(names, wrong)}]}, "there")
    assert found.context_length in (None, 5)
    assert not any(found.capabilities.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "reply",
    [
        Reply(hangs=True),
        Reply((b"[" * 1000,), endless=True),
        Reply((b"{",)),
        Reply((b"\xff",)),
        Reply(status=500),
        Reply(status=302, headers={"location": "http://169.254.169.254/"}),
    ],
    ids=["silent", "endless", "cut", "binary", "failing", "redirecting"],
)
def test_a_start_does_not_depend_on_it(
    reply: Reply, models: Callable[[Reply], None], upstream: PlayingServer
) -> None:
    models(reply)
    with gateway(upstream.url, {"up": {}}) as client:
        upstream.plays(says("Yes"))
        assert answered(client)["choices"][0]["message"]["content"] == "Yes"


def test_a_server_that_comes_later_is_asked_then(
    models: Callable[[Reply], None], upstream: PlayingServer
) -> None:
    models(Reply(breaks=True))
    with gateway(upstream.url, {"up": {}, "gone": {"source": f"openai+{NOWHERE}/v1"}}) as client:
        assert shown(client)["context_length"] is None
        models(listing({**VLLM, "id": "up"}))
        upstream.plays(says("Yes"))
        answered(client)
        until(lambda: shown(client)["context_length"] == 4096)


def state(client: TestClient, id: str = "up") -> str:
    models: Any = client.get("/v1/pool").json()["models"]
    return next(str(each["state"]) for each in models if each["id"] == id)


def test_a_server_looks_ready_only_if_it_responds(
    models: Callable[[Reply], None], upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = {
        "gone": {"source": f"openai+{NOWHERE}/v1"},
        "ibm": {"source": f"watsonx:{NOWHERE}", "upstream_model": "there"},
    }
    models(whole({}, 502))
    with gateway(upstream.url, {"up": {}, **silent}) as client:
        assert state(client, "ibm") == "unasked"  # it has no list of models
        until(lambda: (state(client), state(client, "gone")) == ("unavailable", "unavailable"))
        health = client.get("/health").json()
        assert health["status"] == "degraded"
        assert "does not answer: 2" in health["problems"][0]
        assert "not asked yet: 1" in health["notes"][0]
        models(listing({**VLLM, "id": "up"}))
        monkeypatch.setattr(connection, "PROBE_SECONDS", 0.0)
        until(lambda: state(client) == "ready")  # who looks has it probed
        until(lambda: shown(client)["context_length"] == 4096)
        models(whole({}, 503))
        until(lambda: state(client) == "unavailable")
        monkeypatch.setattr(connection, "PROBE_SECONDS", 60.0)
        upstream.plays(says("Yes"))
        answered(client)
        assert state(client) == "ready"
