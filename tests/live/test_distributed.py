"""A server with a model over two ranks and one on this machine."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.live.ranks import free_ports
from tests.live.server import LiveServer, children, eventually, serving
from tests.tiny import tiny_llama

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
        return http.post("/v1/chat/completions", json=body)


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


def test_a_lost_rank_is_a_503_and_the_group_comes_back(server: LiveServer) -> None:
    expected = text_of(asked(server, "big"))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1800, "stream": True}
    bias = {"0": -100, "2": -100}
    with server.http() as http:
        with http.stream(
            "POST", "/v1/chat/completions", json={**body, "model": "big", "logit_bias": bias}
        ) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if '"content"' in line)
            the_other_rank(server).send_signal(signal.SIGKILL)
            (error,) = (line for line in lines if '"error"' in line)
        assert "of its group" in error, "its end and the error of the link come in any order"
        assert '"engine_died"' in error
        assert http.get("/health").status_code == 503
        assert asked(server, "big").status_code == 503
        assert text_of(asked(server, "small")) == expected, "the other engine goes on"
    eventually(lambda: healthy(server), "the group is back", 60)
    assert text_of(asked(server, "big")) == expected


def healthy(server: LiveServer) -> bool:
    with server.http() as http:
        return http.get("/health").status_code == 200


def test_the_command_line_names_a_hostfile(model: Path, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps(HOSTS), "utf-8")
    with serving(tmp_path, None, "--hostfile", str(hostfile), str(model)) as server:
        assert text_of(asked(server, "tiny"))
        assert the_other_rank(server)
        with server.http() as http:
            assert [m["id"] for m in http.get("/v1/pool").json()["models"]] == ["tiny"]
