"""The whole app with an engine that is scripted: what goes over the wire, and nothing slow."""

import asyncio
import concurrent.futures
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.testclient import TestClient

from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, ServerSettings, Settings, StoreSettings
from mlx_server.engine.client import RowStream
from mlx_server.engine.messages import (
    Admitted,
    Generate,
    KvCost,
    Logprobs,
    PromptLogprobs,
    Stop,
    Token,
)
from mlx_server.errors import EngineDied, ServerError
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.pool import AnswerRecorder
from tests.engine.stub import StubEngine
from tests.tiny import IM_END

CANCELLED = asyncio.CancelledError, concurrent.futures.CancelledError
"""Either may end a WebSocket of the test client, which leaves by cancelling the app."""

MODEL = "tiny"
VOCABULARY = 320
PATIENCE_SECONDS = 10.0
TEXT = "Salü, 世界! 🙂 And so on."
"""What the engine says, a byte a token."""

Json = dict[str, Any]


class ScriptedEngine(StubEngine):
    """Takes every row and has all of its tokens at once."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, KvCost(512))
        self.taken: list[Generate] = []
        self.running: set[int] = set()
        """Rows whose request has not left yet."""
        self.took = asyncio.Event()
        self.silent = False
        """Takes rows and says no more, until it gives up long after a test should have ended."""
        self.gave_up = False
        self.drafts: tuple[int, int] | None = None
        """Of a pass, whose last token is that of the answer."""
        self.failure: ServerError | None = None
        """Comes after a few tokens."""
        self._tokens: list[int] = []

    async def stop(self, error: ServerError | None = None) -> None:
        assert not self.running

    def read(self, path: str) -> None:
        self._tokens = Tokenizer(Path(path) / "tokenizer.json").encode(TEXT)

    @asynccontextmanager
    async def generate(self, rows: Sequence[Generate]) -> AsyncIterator[RowStream]:
        answers = RowStream()
        for row in rows:
            row.row = len(self.taken)
            self.taken.append(row)
            answers.put(Admitted(row.row))
            for item in [] if self.silent else self.said(row):
                answers.put(item)
        if self.failure:
            answers.fail(self.failure)
        elif self.silent:
            asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._run_out, answers)
        with self.computing(row.row for row in rows):
            yield answers

    @contextmanager
    def computing(self, rows: Iterable[int]) -> Iterator[None]:
        """The rows are taken, and free at its end."""
        numbers = {*rows}
        self.running |= numbers
        self.took.set()
        try:
            yield
        finally:
            self.running -= numbers

    def _run_out(self, answers: RowStream) -> None:
        self.gave_up = True
        answers.fail(EngineDied("Nobody left, nothing came."))

    def cancel(self, rows: Sequence[int]) -> None:
        self.running -= set(rows)

    def said(self, row: Generate) -> Iterator[Token | PromptLogprobs]:
        top = row.sampling.logprobs
        if row.prompt_logprobs:
            yield PromptLogprobs(row.row, [_logprobs(id, top or 0) for id in row.prompt[1:]])
        if not row.max_tokens:
            return
        ids = [*self._tokens, IM_END][: 3 if self.failure else row.max_tokens]
        for place, id in enumerate(ids, start=1):
            logprobs = None if top is None else _logprobs(id, top)
            ended: Stop | None = "length" if place == row.max_tokens else None
            drafts = self.drafts if place == len(ids) else None
            yield Token(row.row, id, "stop" if id == IM_END else ended, logprobs, drafts=drafts)


def _logprobs(token: int, top: int) -> Logprobs:
    """Of the token and, as alternatives, of some that follow it in the vocabulary."""
    return Logprobs(-0.5, [(token + i, -0.5 - i) for i in range(top)])


@contextmanager
def client(
    model: Path,
    engine: ScriptedEngine,
    store: StoreSettings | None = None,
    images: Literal["describe", "refuse"] = "describe",
    **server: Any,
) -> Iterator[TestClient]:
    made = app(model, engine, store, images, **server)
    with TestClient(made, base_url="http://localhost", raise_server_exceptions=False) as found:
        yield found


def app(
    model: Path,
    engine: ScriptedEngine,
    store: StoreSettings | None = None,
    images: Literal["describe", "refuse"] = "describe",
    others: Mapping[str, Path] | None = None,
    recorder: AnswerRecorder | None = None,
    **server: Any,
) -> FastAPI:
    settings = Settings(
        server=ServerSettings(**server),
        store=store or StoreSettings(),
        models={
            MODEL: ModelSettings(source=str(model), images=images),
            **{name: ModelSettings(source=str(path)) for name, path in (others or {}).items()},
        },
    )
    made = create_app(settings, recorder=recorder)
    made.state.pool.make_engine = lambda **limits: engine
    return made


def key(text: str) -> SecretStr:
    return SecretStr(text)


def ok(response: httpx2.Response) -> Json:
    assert response.status_code == 200, response.text
    return as_json(response)


def error(response: httpx2.Response, status: int = 400) -> Json:
    """The error, having made sure that it is one as OpenAI writes it."""
    assert response.status_code == status, response.text
    return error_of(as_json(response))


def error_of(body: Json) -> Json:
    assert body.keys() == {"error"}
    found: Json = body["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert isinstance(found["message"], str)
    assert found["message"]
    assert isinstance(found["type"], str)
    for name in ("param", "code"):
        assert found[name] is None or isinstance(found[name], str)
    return found


def as_json(response: httpx2.Response) -> Json:
    assert response.headers["content-type"] == "application/json"
    found: Json = json.loads(response.content)
    return found


def events(response: httpx2.Response) -> list[Json]:
    """What a stream said, having made sure that it is one and that it ended as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed(body: Mapping[str, Any]) -> Json:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def sample(exposition: str, name: str) -> float:
    """The value of a metric."""
    (found,) = [line for line in exposition.splitlines() if line.startswith(f"{name} ")]
    return float(found.removeprefix(name))
