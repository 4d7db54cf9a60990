"""The tier of a request over the wire: the client's, its key's, or that of what it sends in the
background; the answer says which it was."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.config.models_yaml import load_settings
from mlx_server.requests import Tier
from tests.api import wire
from tests.api.test_clients import BODIES, in_the_background
from tests.api.wire import Json, ScriptedEngine
from tests.tables import cases

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
TITLE = "You are a title generator. You output ONLY a thread title."


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def client(tiny_path: Path, engine: ScriptedEngine) -> TestClient:
    return TestClient(wire.app(tiny_path, engine), "http://localhost")


def sent(client: TestClient, path: str, *, headers: Any = None, **more: Any) -> Json:
    return wire.ok(client.post(path, json={**BODIES[path], **more}, headers=headers))


def told(path: str, body: Json) -> str | None:
    told: str | None = (body["usage"] if path == "/v1/messages" else body).get("service_tier")
    return told


@pytest.mark.parametrize("path", PATHS)
def test_each_endpoint_honours_a_tier_and_says_so(
    client: TestClient, engine: ScriptedEngine, path: str
) -> None:
    with client:
        bodies = [sent(client, path, service_tier=t.label) for t in (Tier.PRIORITY, Tier.DEFAULT)]
        bodies += [sent(client, path, service_tier=name) for name in ("flex", "auto")]
        usual = sent(client, path)
        refused = client.post(path, json={**BODIES[path], "service_tier": "platinum"})
        streamed = client.post(path, json={**BODIES[path], "service_tier": "flex", "stream": True})
    tiers = [Tier.PRIORITY, Tier.DEFAULT, Tier.FLEX, Tier.DEFAULT, Tier.DEFAULT, Tier.FLEX]
    assert [row.tier for row in engine.taken] == tiers
    anthropic = {"priority": "priority", "default": "standard", "flex": "standard"}
    names = [anthropic[t.label] if path == "/v1/messages" else t.label for t in tiers[:4]]
    assert [told(path, body) for body in bodies] == names
    assert told(path, usual) == ("default" if path == "/v1/responses" else None)
    assert refused.status_code == 400
    assert "service_tier" in refused.text
    name = "standard" if path == "/v1/messages" else "flex"
    assert f'"service_tier":"{name}"' in streamed.text


def test_other_names(client: TestClient, engine: ScriptedEngine) -> None:
    names = {"standard_only": Tier.DEFAULT, "auto": Tier.DEFAULT, "fast": Tier.PRIORITY}
    with client:
        for name in names:
            sent(client, "/v1/messages", service_tier=name)
    assert [row.tier for row in engine.taken] == list(names.values())


SEEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"headers": {"x-claude-code-request-class": "main"}}),
    ("/v1/messages", {"system": [{"type": "text", "text": "Say what cc_is_subagent=true; is"}]}),
    ("/v1/messages", {"headers": {"x-claude-code-agent-id": "a1"}, "service_tier": "default"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TITLE}]}),
]


@cases
def test_what_clients_send_in_the_background(
    client: TestClient, engine: ScriptedEngine, path: str, request_: dict[str, Any]
) -> None:
    with client:
        body = sent(client, path, **request_)
    assert [row.tier for row in engine.taken] == [Tier.FLEX]
    assert told(path, body) == ("standard" if path == "/v1/messages" else "flex")


def test_background_responses(client: TestClient, engine: ScriptedEngine) -> None:
    with client:
        in_the_background(client)
    assert [row.tier for row in engine.taken] == [Tier.FLEX]


@pytest.mark.parametrize(("path", "request_"), SEEN)
def test_what_a_person_waits_for(
    client: TestClient, engine: ScriptedEngine, path: str, request_: dict[str, Any]
) -> None:
    with client:
        sent(client, path, **request_)
    assert [row.tier for row in engine.taken] == [Tier.DEFAULT]


def test_a_keys_tier(tiny_path: Path, engine: ScriptedEngine, tmp_path: Path) -> None:
    keys = ({"agents-key": "flex"}, {"my-own-key": "priority"}, "other-key")
    (tmp_path / "models.yaml").write_text(json.dumps({"server": {"api_keys": keys}}))
    server = load_settings(tmp_path / "models.yaml", environ={}).server
    app = wire.app(tiny_path, engine, api_keys=server.api_keys)
    path = "/v1/chat/completions"
    with TestClient(app, "http://localhost") as client:
        for key in ("agents-key", "my-own-key", "other-key"):
            by_key = {"authorization": f"Bearer {key}"}
            sent(client, path, headers=by_key)
            sent(client, path, headers=by_key, service_tier="default")
        assert client.post(path, json=BODIES[path]).status_code == 401
    tiers = [row.tier for row in engine.taken]
    assert tiers == [Tier.FLEX, Tier.DEFAULT, Tier.PRIORITY, *[Tier.DEFAULT] * 3]
