"""What a stream notices of the requests of other clients: its tokens, and the time between them."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from attack_parts.servers import Server
from mlx_server.http.security import CLIENT_HEADER

Body = dict[str, Any]

STREAM: Body = {
    "messages": [{"role": "user", "content": "Tell me of the sea."}],
    "temperature": 1,
    "seed": 7,
    "max_tokens": 400,
    "stream": True,
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OTHERS = ("attacker 1", "attacker 2")
"""The names that the attackers give themselves, so that they and the stream are three clients."""
ANSWER_SECONDS = 120.0

WORDS = " ".join(f"word{number}" for number in range(700))
AMBIGUOUS = 'start: s\ns: "a" | s s | s s s\n'


def _chat(**rest: Any) -> tuple[str, Body]:
    message = {"role": "user", "content": "Write."}
    return CHAT, {"messages": [message], "max_tokens": 200, **rest}


def _grammar(source: str, **rest: Any) -> tuple[str, Body]:
    return _chat(structured_outputs={"grammar": source}, temperature=2, **rest)


def _regex(pattern: str, **rest: Any) -> tuple[str, Body]:
    return _chat(structured_outputs={"regex": pattern}, **rest)


def _schema(schema: Body, **rest: Any) -> tuple[str, Body]:
    json_schema = {"name": "answer", "schema": schema}
    return _chat(response_format={"type": "json_schema", "json_schema": json_schema}, **rest)


def _completions(prompts: list[str], **rest: Any) -> tuple[str, Body]:
    return COMPLETIONS, {"prompt": prompts, "max_tokens": 30, **rest}


def _wide(number: int) -> Body:
    """A schema that takes about a second to compile, and another one for each number."""
    inner = {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(10)}}
    names = [f"p{number}_{n}" for n in range(450)]
    return {"type": "object", "properties": dict.fromkeys(names, inner), "required": names}


ATTACKS: dict[str, Callable[[int], tuple[str, Body]]] = {
    "nothing": lambda n: ("/health", {}),
    "n: 15": lambda n: _chat(n=15),  # what so many rows cost by themselves
    "top_p, n: 15": lambda n: _chat(n=15, top_p=0.9),
    "ambiguous grammar, n: 15": lambda n: _grammar(AMBIGUOUS, n=15),
    "ambiguous grammars": lambda n: _grammar(f'{AMBIGUOUS}t: "{n}"\n', n=2),
    "expression that repeats": lambda n: _regex("^((ab|aab|aaab|abb|b)+)*c{900}$", max_tokens=6),
    "wide schemas": lambda n: _schema(_wide(n), max_tokens=40),
    "20 log probabilities, n: 15": lambda n: _chat(n=15, logprobs=True, top_logprobs=20),
    "penalties": lambda n: _chat(n=15, frequency_penalty=1, presence_penalty=1),
    "4096 biases": lambda n: _chat(n=15, logit_bias={str(t): 0.5 for t in range(300, 4396)}),
    "stop texts": lambda n: _chat(n=15, stop=[f"{i}{'x' * 900}" for i in range(4)]),
    "log probabilities of prompts": lambda n: _completions([WORDS], echo=True, logprobs=5),
    "many prompts": lambda n: _completions([f"{n} {i}" for i in range(64)]),
    "long prompts": lambda n: _chat(messages=[{"role": "user", "content": f"{n} {WORDS}"}]),
    "tokenizing": lambda n: ("/tokenize", {"prompt": WORDS * 40}),
}


@dataclass
class Watched:
    """A stream's tokens and the seconds between them."""

    texts: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return sorted(self.gaps)[len(self.gaps) // 2] if self.gaps else 0.0


def watched(server: Server, body: Body = STREAM) -> Watched:
    found, last = Watched(), None
    with server.http() as http:
        http.timeout = httpx.Timeout(ANSWER_SECONDS)
        with http.stream("POST", CHAT, json={**body, "model": server.model}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    found.gaps += [now - last] if last else []
                    last = now
                    found.texts.append(line.partition('"delta":')[2])
    return found


def beside(server: Server, attack: Callable[[int], tuple[str, Body]]) -> tuple[Watched, float]:
    """Watches a stream while others attack, and returns the seconds that a newcomer then waits for
    an answer with a small schema of its own."""
    over = threading.Event()
    threads = [
        threading.Thread(target=_attack, args=(server, client, attack, over, first))
        for first, client in enumerate(OTHERS * 2)
    ]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1)
        found = watched(server)
        path, body = _schema({"enum": [str(time.time())]}, max_tokens=8, temperature=0)
        began = time.perf_counter()
        with server.http() as http:
            answer = http.post(path, json={**body, "model": server.model}, timeout=ANSWER_SECONDS)
            waited = time.perf_counter() - began if answer.is_success else float("inf")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return found, waited


def _attack(
    server: Server,
    client: str,
    attack: Callable[[int], tuple[str, Body]],
    over: threading.Event,
    number: int,
) -> None:
    with server.http() as http:
        http.timeout = httpx.Timeout(ANSWER_SECONDS)
        http.headers[CLIENT_HEADER] = client
        while not over.wait(0.01):
            path, body = attack(number)
            number += len(OTHERS) * 2
            try:
                with http.stream("POST", path, json={**body, "model": server.model}) as answer:
                    for _ in answer.iter_raw():
                        if over.is_set():
                            break
            except httpx.HTTPError:
                continue


def rows(server: Server, only: str | None = None) -> Iterator[tuple[str, ...]]:
    """Yields a row of the table for each attack."""
    server.start()
    try:
        watched(server)
        alone = watched(server)
        for name, attack in ATTACKS.items():
            if only in (None, name):
                found, waited = beside(server, attack)
                milliseconds = (found.median, max(found.gaps), waited)
                same = "yes" if found.texts == alone.texts else "no"
                yield name, *(f"{1000 * each:.0f} ms" for each in milliseconds), same
    finally:
        server.stop()
