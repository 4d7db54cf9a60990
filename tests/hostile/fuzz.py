"""Bad bodies without end at a real server: each gets an answer, and no other client notices.

A failing input is made as small as it goes, and printed as a line for a shell.
"""

import base64
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import typer

from mlx_server import limits
from mlx_server.api.fields import IGNORED_HEADER
from tests.api.wire import error_of
from tests.hostile.bodies import generated, shrunk
from tests.hostile.routes import CONTEXT, EMBEDS, HI, RANKS, ROUTES, SAID, TINY, Json, Route
from tests.live.server import LiveServer, serving
from tests.tiny import tiny_llama, tiny_reranker

PATIENCE_SECONDS = 60.0
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TRANSCRIPT = (
    {"match": "regex:^Our conversation has become too long", "output": "They talked."},
    {"output": f"<think>\nHm.\n</think>\n\n{CALL}"},
)
ENDS = {f"event: response.{kind}" for kind in ("completed", "incomplete", "failed", "cancelled")}


@dataclass(frozen=True)
class Answer:
    status: int
    kind: str
    """Its content type."""
    content: bytes
    ignored: str | None = None
    """The names of what it does not know."""


@dataclass(frozen=True)
class Witness:
    """What is the same after an attack as before it."""

    engine: int
    tokens: Any


@dataclass(frozen=True)
class Target:
    server: LiveServer
    engine: psutil.Process
    response: str
    conversation: str
    """Ids of one each, which are there."""

    def path(self, route: Route) -> str:
        is_response = route.path.startswith("/v1/responses")
        return route.path.format(id=self.response if is_response else self.conversation)

    def post(self, path: str, body: bytes) -> Answer:
        return posted(self.server, path, body)

    def witness(self) -> Witness:
        asked = {
            "model": TINY,
            "messages": [HI],
            "max_tokens": 12,
            "logprobs": True,
            "temperature": 0.7,
            "seed": 5,
        }
        answer = self.post("/v1/chat/completions", json.dumps(asked).encode())
        assert answer.status == 200, answer
        (choice,) = json.loads(answer.content)["choices"]
        tokens = [token["token"] for token in choice["logprobs"]["content"]]
        return Witness(self.server.engine.pid, tokens)

    def complaint(self, route: Route, body: bytes) -> str | None:
        """What is wrong with the answer to it, if anything."""
        try:
            judge(route, self.post(self.path(route), body))
        except (AssertionError, OSError, HTTPException, LookupError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None if self.engine.is_running() else "the engine has ended"


@contextmanager
def target(folder: Path, tiny: Path) -> Iterator[Target]:
    (folder / "said.jsonl").write_text("\n".join(map(json.dumps, TRANSCRIPT)), "utf-8")
    # hundreds of documents, each in a prompt of its own
    reranker = tiny_reranker(folder / RANKS, layers=1, hidden=16)
    models = {
        TINY: {"source": str(tiny), **_brief()},
        SAID: {"source": "replay:said.jsonl", "family": "qwen3", **_brief()},
        EMBEDS: {"source": str(tiny), "task": "embed", **_brief()},
        RANKS: {"source": str(reranker), **_brief()},
    }
    server_settings = {"adapter_dirs": ["."]}
    with serving(folder, {"server": server_settings, "models": models}) as server:
        response = _made(
            server, "/v1/responses", {"model": TINY, "input": "hi", "background": True}
        )
        yield Target(server, server.engine, response, _made(server, "/v1/conversations", {}))


def _brief() -> Json:
    return {"preload": True, "context_length": CONTEXT, "defaults": {"max_tokens": 2}}


def posted(server: LiveServer, path: str, body: bytes) -> Answer:
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)) as connection:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        kind, ignored = response.headers["content-type"], response.headers[IGNORED_HEADER]
        return Answer(response.status, kind, response.read(), ignored)


def _made(server: LiveServer, path: str, body: Json) -> str:
    answer = posted(server, path, json.dumps(body).encode())
    assert answer.status == 200, answer
    id: str = json.loads(answer.content)["id"]
    return id


def judge(route: Route, answer: Answer) -> None:
    """It is a whole answer, or a refusal as OpenAI, Anthropic or Ollama writes it."""
    if answer.status != 200:
        assert 400 <= answer.status < 500 or answer.status == 503, answer
        assert answer.kind == "application/json"
        body = json.loads(answer.content)
        error = error_in(route, body)
        assert len(error["message"]) <= limits.ERROR_CHARACTERS, answer
    elif answer.kind == "application/json":
        body = strictly(answer.content)
        if isinstance(body, list):  # several answers of /infill
            body = body[0]
        assert not body.get("error"), answer
        JUDGES.get(route.path, dict)(body)
    elif is_ollama(route):
        assert answer.kind == "application/x-ndjson", answer
        *_, last = map(strictly, answer.content.splitlines())
        assert last.get("done") or last["error"], last
    else:
        assert answer.kind.startswith("text/event-stream"), answer
        _judge_stream(route, answer.content.decode())


def is_anthropic(route: Route) -> bool:
    return route.path.startswith("/v1/messages")


def is_ollama(route: Route) -> bool:
    return route.path.startswith("/api/")


def error_in(route: Route, body: Json) -> Json:
    if is_ollama(route):
        assert body.keys() == {"error"}
        assert isinstance(body["error"], str)
        return {"message": body["error"]}
    assert isinstance(body["error"], dict)
    return anthropic_error(body) if is_anthropic(route) else error_of(body)


def anthropic_error(body: Json) -> Json:
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    error: Json = body["error"]
    assert error.keys() - {"details"} == {"type", "message"}
    assert error["message"]
    return error


def strictly(content: bytes | str) -> Any:
    """No NaN, which JSON has not."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} in JSON")

    return json.loads(content, parse_constant=refuse)


def _judge_choices(body: Mapping[str, Any]) -> None:
    assert body["usage"]["prompt_tokens"]
    assert all(answer["finish_reason"] for answer in body.get("choices", [body]))


def _judge_response(body: Mapping[str, Any]) -> None:
    if not body["background"]:
        assert body["usage"]
        assert body["status"] in {"completed", "incomplete"}


def _judge_message(body: Mapping[str, Any]) -> None:
    assert sum(count for name, count in body["usage"].items() if "input" in name)
    assert body["stop_reason"]


JUDGES: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "/v1/chat/completions": _judge_choices,
    "/v1/completions": _judge_choices,
    "/generate": _judge_choices,
    "/v1/responses": _judge_response,
    "/v1/messages": _judge_message,
}


def _judge_stream(route: Route, text: str) -> None:
    *events, end = text.split("\n\n")
    if route.path == "/infill":
        last_event = strictly(events[-1].removeprefix("data: "))
        assert last_event.get("stop") or last_event["error"], text[-200:]
        return
    last = ("event: message_stop", "event: error") if is_anthropic(route) else ("data: [DONE]",)
    assert events[-1].partition("\n")[0] in last, text[-200:]
    assert not end, text[-200:]
    if not is_anthropic(route):
        events.pop()
    for event in events:
        strictly(event[event.index("data: ") + len("data: ") :])
    if route.path == "/v1/responses":
        assert events[-1].partition("\n")[0] in ENDS, events[-1]


def reported(target: Target, route: Route, body: bytes) -> str:
    """The failure for a shell, as small as it goes."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict):
        body = _shrunk(target, route, found) or body
    return f"{_text(body)} | curl {shlex.quote(target.server.url + target.path(route))} {CURL}"


def _shrunk(target: Target, route: Route, body: Json) -> bytes | None:
    """None if it does not fail once more."""

    def fails(smaller: Json) -> bool:
        return target.complaint(route, json.dumps(smaller).encode()) is not None

    return json.dumps(shrunk(body, fails)).encode() if fails(body) else None


CURL = "-H 'content-type: application/json' --data-binary @-"


def _text(body: bytes) -> str:
    if body.isascii() and body.decode().isprintable():
        return f"printf %s {shlex.quote(body.decode())}"
    return f"echo {base64.b64encode(body).decode()} | base64 -d"


def run(target: Target, route: Route, seed: int, numbers: range) -> Iterator[str]:
    """Each failure, as it is met."""
    before = target.witness()
    for number in numbers:
        body = generated(route, seed, number)
        if complaint := target.complaint(route, body):
            yield (
                f"--seed {seed} --only {route.path} --number {number}: {complaint[:500]}\n"
                + reported(target, route, body)
            )
    if (after := target.witness()) != before:
        yield f"--seed {seed} --only {route.path}: {before} before, {after} after"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    count: Annotated[int, typer.Option(min=1, help="Bodies for each route.")] = 10_000,
    seed: Annotated[int | None, typer.Option(help="The same one, the same bodies.")] = None,
    only: Annotated[str, typer.Option(metavar="PATH", help="One of the routes.")] = "",
    number: Annotated[int | None, typer.Option(min=0, help="One of the bodies.")] = None,
) -> None:
    """Sends bad bodies to every POST route of a server of its own; fails if any is not answered
    with what was asked for or a refusal, or changes anything for others."""
    seed = int(time.time()) if seed is None else seed
    numbers = range(count) if number is None else range(number, number + 1)
    failures = 0
    with TemporaryDirectory() as name, target(Path(name), tiny_llama(Path(name) / "tiny")) as found:
        for route in ROUTES:
            if only in ("", route.path):
                began = time.monotonic()
                for failure in run(found, route, seed, numbers):
                    failures += 1
                    print(failure, flush=True)
                seconds = time.monotonic() - began
                print(
                    f"{route.path}: {len(numbers)} bodies, seed {seed}, {seconds:.0f} s", flush=True
                )
        if "Traceback" in found.server.log:
            failures += 1
            print(found.server.log)
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    app(prog_name="scripts/fuzz")
