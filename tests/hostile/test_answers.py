"""What reads a row's tokens goes wrong, on the server's side: one answer ends, with an error."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, Settings
from mlx_server.generation.output import RowOutput
from tests.api.wire import events
from tests.live.server import TINY

CHAT = "/v1/chat/completions"
ROWS = 8
POISONED = 3
STEPS = [0, 1, 17]


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    settings = Settings(models={TINY: ModelSettings(source=str(tiny_path), preload=True)})
    with TestClient(
        create_app(settings), base_url="http://localhost", raise_server_exceptions=False
    ) as found:
        yield found


Reply = tuple[int, str, Any]
"""The status, the text, and the error."""


def answers(client: TestClient, *, stream: bool) -> list[Reply]:
    """To eight requests at once."""
    with ThreadPoolExecutor(ROWS) as threads:
        return list(threads.map(partial(answer, client, stream=stream), range(ROWS)))


def answer(client: TestClient, row: int, *, stream: bool) -> Reply:
    asked = {"model": TINY, "messages": [{"role": "user", "content": f"Row {row}"}], "seed": row}
    body = {**asked, "max_tokens": 24, "logit_bias": {"0": -100, "2": -100}, "stream": stream}
    response = client.post(CHAT, json=body)
    chunks = events(response) if stream else [response.json()]
    text, error = "", None
    for chunk in chunks:
        error = chunk.get("error", error)
        for choice in chunk.get("choices", ()):
            text += choice["delta" if stream else "message"].get("content") or ""
    return response.status_code, text, error


class Fails:
    """Does as what it stands for does, so many times."""

    def __init__(self, what: Any, times: int) -> None:
        self._what, self._left = what, times

    def feed(self, *given: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise IndexError("a secret of the machine's")
        return self._what.feed(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._what, name)


@pytest.fixture(scope="module")
def unharmed(client: TestClient) -> list[Reply]:
    reported = answers(client, stream=False)
    assert all(status == 200 and text for status, text, _ in reported)
    assert answers(client, stream=True) == reported
    return reported


@pytest.mark.parametrize(
    ("part", "step", "stream"),
    [*(("_parser", step, False) for step in STEPS), *(("_text", step, True) for step in STEPS)],
)
def test_an_answer_that_can_not_be_read_ends_alone(
    client: TestClient,
    unharmed: list[Reply],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    step: int,
    stream: bool,
) -> None:
    def begin(self: RowOutput, *given: Any) -> None:
        made(self, *given)
        if self._request.seed == POISONED:
            setattr(self, part, Fails(getattr(self, part), step))

    made = RowOutput.__init__
    monkeypatch.setattr(RowOutput, "__init__", begin)
    reported = answers(client, stream=stream)
    (status, text, error), wanted = reported.pop(POISONED), list(unharmed)
    assert wanted.pop(POISONED)[1].startswith(text)
    assert reported == wanted
    assert (status, error["code"]) == (200 if stream else 500, "internal_error")
    assert "secret" not in str(error)
    assert client.get("/v1/pool").json()["memory"]["kv_reserved"] == 0
    assert client.get("/health").status_code == 200
