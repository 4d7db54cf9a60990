"""A server with a model over two ranks and one on this machine."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.live.ranks import free_ports
from tests.live.server import LiveServer, children, eventually, serving
from tests.tiny import tiny_llama

RESUMED = "mlx_server_resumed_requests"
HOSTS = [{"ssh": name, "ips": ["127.0.0.1"]} for name in ("127.0.0.1", "localhost")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    over = {"hosts": HOSTS, "port": free_ports(2)}
    config = {
        "server": {"memory_budget": "3GB"},
        "models": {
            "big": {"source": str(model), "distributed": over, "preload": True},
            "small": {"source": str(model)},
        },
    }
    with serving(tmp_path_factory.mktemp("served"), config) as server:
        yield server


def asked(server: LiveServer, model: str, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0, **more}
    with server.http() as http:
        return http.post("/v1/chat/completions", json=body, timeout=120)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def the_other_rank(server: LiveServer) -> psutil.Process:
    (found,) = (p for p in children(server.process.pid) if is_rank(p))
    return found


def is_rank(process: psutil.Process) -> bool:
    try:
        return "mlx_server.worker.ranks.follower" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def test_its_answers_are_those_of_one_process_and_its_memory_is_a_share(server: LiveServer) -> None:
    assert text_of(asked(server, "big")) == text_of(asked(server, "small"))
    with server.http() as http:
        found = http.get("/v1/pool").json()
    big, small = ({m["id"]: m["bytes"] for m in found["models"]}[id] for id in ("big", "small"))
    assert small / 2 < big < 0.8 * small, "the embeddings are whole on each rank"
    assert found["memory"]["budget"] == 3 * 10**9


def test_a_schema_holds_and_a_stream_streams(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = asked(server, "big", response_format=format, max_tokens=60)
    assert isinstance(json.loads(text_of(answer))["a"], bool)
    with server.openai() as client:
        stream = client.chat.completions.create(
            model="big",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=5,
            stream=True,
            temperature=0,
        )
        assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == "length"


def test_an_adapter_is_refused_with_the_reason(server: LiveServer) -> None:
    answer = asked(server, "big", adapter="any")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapter")
    assert "split over 2 ranks" in answer.json()["error"]["message"]


@pytest.mark.parametrize("lost", ["rank", "engine"])
def test_answers_go_on_in_the_group_that_replaces_a_lost_one(server: LiveServer, lost: str) -> None:
    body: dict[str, Any] = {"max_tokens": 400, "logit_bias": {"0": -100, "2": -100}}
    body |= {"temperature": 1, "seed": 5}
    expected, small = text_of(asked(server, "big", **body)), text_of(asked(server, "small"))
    resumed = server.gauge(RESUMED)
    with ThreadPoolExecutor(2) as threads:
        under_way = threads.submit(asked, server, "big", **body)
        eventually(lambda: server.gauge("mlx_server_batch_size") == 1, "it has a token")
        other = the_other_rank(server)
        killed = other if lost == "rank" else other.parent()
        assert killed
        killed.kill()
        eventually(lambda: not server.is_healthy(), "health says so")
        begun = threads.submit(asked, server, "big", **body)
        assert text_of(asked(server, "small")) == small, "the other engine goes on"
        assert [text_of(each.result(120)) for each in (under_way, begun)] == 2 * [expected]
    assert server.gauge(RESUMED) > resumed
    assert server.is_healthy()


def test_the_command_line_names_a_hostfile(model: Path, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps(HOSTS), "utf-8")
    with serving(tmp_path, None, "--hostfile", str(hostfile), str(model)) as server:
        assert text_of(asked(server, "tiny"))
        assert the_other_rank(server)
        with server.http() as http:
            assert [m["id"] for m in http.get("/v1/pool").json()["models"]] == ["tiny"]
