"""A server that is replaced by another process while it answers, and one that can't be."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from mlx_server.errors import ServerError
from mlx_server.models.vision import can_see
from mlx_server.system import handover, service
from mlx_server.system.servers import FOLDER
from tests.hostile.wounds import POISON, knife
from tests.live.chaos import CHAT, COMPLETIONS, EMBEDDINGS, PIECES, RERANK, is_same, normalised
from tests.live.server import (
    PLAIN,
    STOP_SECONDS,
    TINY,
    LiveServer,
    assert_gone,
    children,
    eventually,
    serving,
)
from tests.tiny import tiny_embedder, tiny_llama, tiny_reranker
from tests.tiny_vision import tiny_vision
from tests.worker.lora_files import mlx_adapter

LONG: dict[str, Any] = {
    "model": TINY,
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "temperature": 0,
    "max_tokens": 120,
    "stream": True,
    "logit_bias": {str(id): -100 for id in range(3)},  # so that it does not end early
}


ENDED = {"completed", "incomplete"}


@pytest.fixture
def server(tmp_path: Path, tiny_path: Path) -> Iterator[LiveServer]:
    config = {"models": {TINY: {"source": str(tiny_path), "preload": True}}}
    with serving(tmp_path, config) as server:
        eventually(lambda: f"{TINY} is ready" in server.log, "the model is loaded", 60)
        yield server


def restarted(server: LiveServer, *command: str) -> Result:
    """What `mlx-server restart` prints, or another command."""
    data = str(server.log_file.parent / "data")
    return CliRunner().invoke(app, command or ["restart"], env={"MLX_SERVER_DATA": data})


def ask(server: LiveServer) -> str:
    return handover.ask(server.log_file.parent / "data" / FOLDER, server.process.pid)


def servers(server: LiveServer) -> list[psutil.Process]:
    """Those that the first process has started."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "serve" in child.cmdline():
                found.append(child)
    return found


def answer(server: LiveServer, body: dict[str, Any] = LONG) -> str:
    with server.http() as http, http.stream("POST", CHAT, json=body, timeout=120) as response:
        assert response.status_code == 200
        stream = "".join(response.iter_text())
    assert stream.endswith("data: [DONE]\n\n")
    lines = (line for line in stream.splitlines() if line.startswith("data: "))
    data = (line.removeprefix("data: ") for line in lines)
    chunks = [json.loads(line) for line in data if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    choices.sort(key=lambda choice: choice["index"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_no_stream_ends_and_no_connection_is_refused(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, over = answer(server), Event()
    kept = httpx.Client(**PLAIN, base_url=server.url, timeout=120)
    made: list[str] = []

    def stream() -> None:
        assert answer(server) == expected

    def knock() -> None:
        kept.get("/health").raise_for_status()
        httpx.get(f"{server.url}/health", **PLAIN, timeout=120).raise_for_status()

    def run_in_background() -> None:
        body = {"model": TINY, "input": "A story.", "background": True, "max_output_tokens": 300}
        response = kept.post("/v1/responses", json=body)
        made.append(response.raise_for_status().json()["id"])
        eventually(lambda: bool(status(made[-1]) in ENDED or over.wait(0.2)), "its end", 60)

    def status(id: str) -> str:
        """Whichever server has it."""
        told: str = kept.get(f"/v1/responses/{id}").raise_for_status().json()["status"]
        return told

    def again_and_again(work: Callable[[], None]) -> None:
        while not over.is_set():
            work()
            time.sleep(0.02)

    with kept, ThreadPoolExecutor(4) as threads:
        works = [stream, stream, knock, run_in_background]
        running = [threads.submit(again_and_again, work) for work in works]
        try:
            done = restarted(server)
            assert (done.exit_code, done.exception) == (0, None), done
            (new,) = servers(server)
            assert f"process {new.pid}" in done.output
            # once its answers have ended, the first process holds sockets and nothing else
            first = psutil.Process(server.process.pid)
            eventually(lambda: handover.__name__ in first.cmdline(), "it executes another", 60)
            monkeypatch.setattr(service, "main_pid", lambda: first.pid)
            again = restarted(server, "service", "restart")
            assert f"process {new.pid}" not in again.output
            assert again.exit_code == 0
            eventually(lambda: new not in servers(server), "the one before ends", 60)
        finally:
            over.set()
        for each in running:
            each.result()
        assert len(made) > 1
        eventually(lambda: {status(id) for id in made} <= ENDED, "their end", 60)
    (new,) = servers(server)
    left = children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(STOP_SECONDS) == 0
    assert new in left
    assert_gone(left)


def test_one_that_can_not_start_changes_nothing(server: LiveServer) -> None:
    file = server.log_file.parent / "models.yaml"
    good = file.read_text()
    file.write_text("server: {prot: 1}\n")
    wrong = restarted(server)
    assert isinstance(wrong.exception, ServerError)
    assert "goes on" in wrong.exception.message
    assert "server.prot" in wrong.exception.message
    file.write_text(yaml.safe_dump({**yaml.safe_load(good), "server": {"host": "localhost"}}))
    with pytest.raises(ServerError, match="keeps the address"):
        ask(server)
    file.write_text(good)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, server)
        eventually(lambda: bool(servers(server)), "a new one starts")
        with pytest.raises(ServerError, match="restarted already"):
            ask(server)
        servers(server)[0].kill()
        with pytest.raises(ServerError, match="exit code 137"):
            asked.result()
    assert not servers(server)
    with server.http() as http:
        assert http.post("/v1/completions", json={"model": TINY, "prompt": "a"}).is_success
    unknown = restarted(server, "restart", "--port", "1")
    assert isinstance(unknown.exception, ServerError)
    assert f"that run ({server.url}) name one by --port" in unknown.exception.message
    none = CliRunner().invoke(app, ["restart"], env={"MLX_SERVER_DATA": str(file.parent / "no")})
    assert "No server runs. One that has another data" in str(none.exception)
    # what has replaced a server does not outlive the first process
    ask(server)
    assert "takes the requests from now on" in server.log
    left = children(server.process.pid)
    server.process.kill()
    server.process.wait()
    assert_gone(left)


SMALL_MACHINE = """
import psutil
memory = psutil.virtual_memory()._replace(total={total})
psutil.virtual_memory = lambda: memory
"""


PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAAAgAQMAAACYU+zHAAAAA1BMVEUAAP+KeNJXAAAADUlEQVR42mNgGAX4AAABIAAB"
    "88VDdwAAAABJRU5ErkJggg=="
)
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
DRAWN: dict[str, Any] = {**LONG, "max_tokens": 1500, "temperature": 1, "seed": 4}
SEEN = {**DRAWN, "model": "sees", "messages": [{"role": "user", "content": [IMAGE]}]}
ECHOED = {"model": TINY, "prompt": "The sea. " * 60, "echo": True, "logprobs": 2, "temperature": 0}
RANKED = {"model": "ranks", "query": "The sea?", "documents": PIECES[:9]}
LETTERS = {"structured_outputs": {"regex": "[a-z ]{1800}"}, "logit_bias": {}}

EARLY: dict[str, tuple[str, dict[str, Any]]] = {
    "adapter": (CHAT, {**DRAWN, "adapter": "x"}),
    "grammar": (CHAT, {**DRAWN, **LETTERS}),
    "n of 2": (CHAT, {**DRAWN, "n": 2, "frequency_penalty": 0.5}),
    "echo": (COMPLETIONS, {**ECHOED, "max_tokens": 1400, "stream": True}),
    "picture": (CHAT, SEEN),
}
"""Requests whose answers the first server has begun."""

LATE: dict[str, tuple[str, dict[str, Any]]] = {
    "no tokens": (COMPLETIONS, {**ECHOED, "max_tokens": 0}),
    "late echo": (COMPLETIONS, {**ECHOED, "max_tokens": 20}),
    "embeddings": (EMBEDDINGS, {"model": "embeds", "input": PIECES}),
    "rerank": (RERANK, RANKED),
    "late picture": (CHAT, {**SEEN, "max_tokens": 20}),
}
"""Those that it has completely once it has no engine any more."""


@dataclass
class Client:
    """One who may hold the end of its request back."""

    route: str
    body: dict[str, Any]
    completes: Event = field(default_factory=Event)
    """Set for the last byte of the request to be sent."""
    has_begun: Event = field(default_factory=Event)
    """Set once the answer has begun."""

    def ask(self, server: LiveServer) -> str:
        """The answer without ids and times."""
        sent, answer = json.dumps(self.body).encode(), ""
        head = {"content-type": "application/json", "content-length": str(len(sent))}

        def content() -> Iterator[bytes]:
            yield sent[:-1]
            self.completes.wait()
            yield sent[-1:]

        with (
            httpx.Client(**PLAIN, base_url=server.url, timeout=300) as http,
            http.stream("POST", self.route, headers=head, content=content()) as response,
        ):
            assert response.is_success or self.body.get("max_tokens") == POISON, response.read()
            for piece in response.iter_text():
                answer += piece
                self.has_begun.set()
        return normalised(answer)


def models_of(folder: Path) -> dict[str, Any]:
    path = tiny_llama(folder / "m", vocabulary=12000, hidden=256)
    adapters = {"x": {"path": str(mlx_adapter(folder / "x", path))}}
    models: dict[str, Any] = {
        TINY: {"source": str(path), "preload": True, "adapters": adapters},
        "embeds": {"source": str(tiny_embedder(folder / "embeds"))},
        "ranks": {"source": str(tiny_reranker(folder / "ranks"))},
    }
    if can_see():
        models["sees"] = {"source": str(tiny_vision(folder / "sees", "qwen3_vl"))}
    return models


@pytest.mark.slow
def test_where_memory_holds_no_second_model_the_new_engine_goes_on_with_the_rows(
    tmp_path: Path,
) -> None:
    """That of the third server and then of the fourth, while a request ends engines."""
    models = models_of(tmp_path)
    small = SMALL_MACHINE.format(total=1_070_000_000 if can_see() else 150_000_000)
    cases = {name: case for name, case in {**EARLY, **LATE}.items() if case[1]["model"] in models}
    clients = {name: Client(*case) for name, case in cases.items()}
    large = "sees" if can_see() else TINY
    begun = [each for name, each in clients.items() if name in EARLY]
    held = [each for name, each in clients.items() if name in LATE]
    poisoned, told = Client(CHAT, {**LONG, "max_tokens": POISON}), {"model": TINY, "input": "Hi"}
    config = {"server": {"receive_seconds": 900}, "models": models}
    with (
        ThreadPoolExecutor(len(clients) + 1) as threads,
        knife(tmp_path / "knife", small) as wounding,
        serving(tmp_path, config) as server,
        server.http() as http,
        ExitStack() as stack,
    ):
        for each in (*clients.values(), poisoned):
            each.completes.set()
            stack.callback(each.completes.set)

        def knock_until(times: int) -> None:
            while server.log.count("goes on with its answers") < times:  # it may take one more
                body = {"model": large, "prompt": "a", "max_tokens": 4}
                new = httpx.post(f"{server.url}{COMPLETIONS}", **PLAIN, json=body, timeout=300)
                assert new.is_success, new.text

        def respond(**more: Any) -> dict[str, Any]:
            body = {**told, "temperature": 0, "max_output_tokens": 1500, **more}
            response = http.post("/v1/responses", json=body, timeout=300)
            found: dict[str, Any] = response.raise_for_status().json()
            return found

        def response_of(id: str) -> dict[str, Any]:
            found: dict[str, Any] = http.get(f"/v1/responses/{id}").raise_for_status().json()
            return found

        def leases() -> int:
            return sum(each["leases"] for each in http.get("/v1/pool").json()["models"])

        alone = threads.map(lambda client: client.ask(server), clients.values())
        expected, response = dict(zip(clients, alone, strict=True)), respond()["output"]
        for each in clients.values():
            each.has_begun.clear()
        for each in (*held, poisoned):
            each.completes.clear()
        wounding.strike("step", "slow 0.05")
        failing = threads.submit(poisoned.ask, server)
        answers = {name: threads.submit(c.ask, server) for name, c in clients.items()}
        id = respond(background=True)["id"]
        leaver = stack.enter_context(
            httpx.stream("POST", f"{server.url}{CHAT}", **PLAIN, json=DRAWN, timeout=300)
        )
        pieces = leaver.iter_text()
        assert next(pieces)
        assert all(each.has_begun.wait(60) for each in begun)
        ask(server)
        (second,) = servers(server)
        ask(server)
        eventually(lambda: second not in servers(server), "it had nothing to answer", 60)
        knock_until(1)
        poisoned.completes.set()
        assert "request_ends_engine" in failing.result(300)
        for each in held:
            each.completes.set()
        done = {name: answers[name].result(300) for name in clients if name in LATE}
        before = leases()
        leaver.close()
        eventually(lambda: leases() < before, "its row is gone", 60)
        ask(server)
        knock_until(2)
        assert not any(answers[name].done() for name in clients if name in EARLY)
        wounding.heal()
        done |= {name: answers[name].result(300) for name in clients if name in EARLY}
        assert [name for name in cases if not is_same(done[name], expected[name])] == []
        eventually(lambda: response_of(id)["status"] in ENDED, "the response ends", 60)
        assert response_of(id)["output"][0]["content"] == response[0]["content"]
