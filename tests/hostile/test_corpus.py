"""Every attack of the corpus on one server: each gets its answer, and nobody else notices."""

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import httpx
import pytest

from tests.api.wire import error_of
from tests.hostile.corpus import CATEGORIES, Attack, Call, Json, Target, attacks
from tests.hostile.sending import Outcome, carry_out
from tests.live.server import PLAIN, LiveServer, eventually, serving

MODEL, REPLAYED = "tiny", "replayed"
NAMES = [module.__name__.rpartition(".")[2] for module in CATEGORIES]
THREADS = 18
"""Ten of them wait, most of the time, for the server to lose its patience."""
PATIENCE_SECONDS, RECEIVE_SECONDS = 120.0, 10.0
REST_SECONDS = 0.2
KEPT = httpx.Limits(keepalive_expiry=2.0)
"""Shorter than the server keeps a connection, so that none is used while it is closed."""

CLEAR = 1e-2
"""A likeliest token that float noise does not change."""
STREAMED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Sea"}],
    "temperature": 0,
    "max_tokens": 60,
    "logit_bias": {"0": -100, "2": -100},
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
}


@dataclass(frozen=True)
class Witness:
    """What must be the same after the attacks as before them."""

    server: int
    engine: int
    tokens: list[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[LiveServer]:
    from tests.worker.lora_files import mlx_adapter

    folder = tmp_path_factory.mktemp("hostile")
    mlx_adapter(folder / "adapters" / "odd", tiny_path)
    (folder / "adapters" / "broken").mkdir()
    (folder / "adapters" / "broken" / "adapter_config.json").write_text("{")
    (folder / "said.jsonl").write_text(json.dumps({"match": "regex:.", "output": "Yes, yes."}))
    config = {
        "server": {"adapter_dirs": ["."], "receive_seconds": RECEIVE_SECONDS},
        "models": {
            MODEL: {"source": str(tiny_path), "preload": True},
            REPLAYED: {"source": "replay:said.jsonl", "family": "hermes", "preload": True},
        },
    }
    with serving(folder, config) as server:
        yield server
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@dataclass(frozen=True)
class Run:
    outcomes: Mapping[str, Outcome | Exception]
    before: Witness
    after: Witness
    meanwhile: list[list[str]]
    """What those got who streamed all the time."""


@pytest.fixture(scope="module")
def run(server: LiveServer, request: pytest.FixtureRequest) -> Run:
    """Of the categories that were selected, in several threads, once."""
    wanted = {item.name for item in request.session.items}
    chosen = [each for name in NAMES if f"test_attacks[{name}]" in wanted for each in of(name)]
    chosen.sort(key=outwaits, reverse=True)
    before = witness(server)
    with (
        streaming_on(server) as meanwhile,
        http(server) as client,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        found = list(threads.map(partial(carried_out, client), chosen))
    outcomes = dict(zip(map(str, chosen), found, strict=True))
    return Run(outcomes, before, witness(server), meanwhile)


def outwaits(attack: Attack) -> bool:
    """Those that may wait for the server to lose its patience; they are begun first."""
    return not attack.expected.steps[-1].isdisjoint({"closes", 100})


def carried_out(http: httpx.Client, attack: Attack) -> Outcome | Exception:
    try:
        return carry_out(attack, http)
    except (OSError, httpx.HTTPError) as error:
        return error


def http(server: LiveServer) -> httpx.Client:
    return httpx.Client(**PLAIN, base_url=server.url, timeout=PATIENCE_SECONDS, limits=KEPT)


def witness(server: LiveServer) -> Witness:
    with http(server) as client:
        assert client.get("/health").status_code == 200
        return Witness(server.process.pid, server.engine.pid, tokens(streamed(client)))


def tokens(steps: list[Json]) -> list[str]:
    return [step["token"] for step in steps]


def streamed(client: httpx.Client) -> list[Json]:
    """With the alternatives at each step."""
    answer = client.post("/v1/chat/completions", json=STREAMED)
    assert answer.status_code == 200, answer.text
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event[0] != ":"]
    reported = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    return [step for logprobs in reported if logprobs for step in logprobs["content"]]


@contextmanager
def streaming_on(server: LiveServer) -> Iterator[list[list[str]]]:
    """Somebody streams again and again, with rests that leave the processor to the attacks."""
    over, found = threading.Event(), list[list[str]]()

    def stream() -> None:
        with http(server) as client:
            while not over.wait(REST_SECONDS):
                found.append(tokens(streamed(client)))

    with ThreadPoolExecutor(1) as thread:
        streaming = thread.submit(stream)
        yield found
        over.set()
        streaming.result(PATIENCE_SECONDS)


def test_what_is_streamed_is_beyond_doubt(server: LiveServer) -> None:
    with http(server) as client:
        for step in streamed(client):
            first, second = step["top_logprobs"]
            assert first["logprob"] - second["logprob"] > CLEAR


def test_nobody_notices(server: LiveServer, run: Run) -> None:
    """Of the attacks that were selected."""
    eventually(server.idle, "no row is left")
    assert len(run.before.tokens) > 20
    assert run.after == run.before
    assert len(run.meanwhile) > 0
    assert all(got == run.before.tokens for got in run.meanwhile)


@pytest.mark.parametrize("category", NAMES)
def test_attacks(run: Run, category: str) -> None:
    """An error says what it has to, and no more; an answer is a whole one."""
    failures: dict[str, object] = {}
    for attack in of(category):
        outcome = run.outcomes[str(attack)]
        try:
            if isinstance(outcome, Exception):
                raise outcome
            assert outcome.meets(attack.expected), (outcome.steps, outcome.body[:500])
            if isinstance(attack.sent, Call) and attack.sent.method != "HEAD":
                look_at(outcome, attack)
        except Exception as error:
            failures[str(attack)] = error
    assert not failures


@cache
def corpus() -> list[Attack]:
    return list(attacks(Target(MODEL, head=320, tokens=259)))


def of(category: str) -> list[Attack]:
    return [attack for attack in corpus() if attack.category == category]


def look_at(outcome: Outcome, attack: Attack) -> None:
    assert "x-evil" not in outcome.headers
    if outcome.steps == (200,):
        assert outcome.is_whole()
        return
    error = error_of(json.loads(outcome.body))
    assert len(outcome.body) < 1000
    reported = {name: error[name] for name in attack.expected.error}
    assert reported == attack.expected.error
