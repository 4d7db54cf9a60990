"""What reads a row's tokens goes wrong, on the server's side: one answer ends, with an error."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, Settings
from mlx_server.generation.output import RowOutput
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


def body(row: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": TINY,
        "messages": [{"role": "user", "content": f"Row {row}"}],
        "max_tokens": 24,
        "seed": row,
        "logit_bias": {"0": -100, "2": -100},
        "stream": stream,
    }


@dataclass
class Reply:
    status: int
    text: str = ""
    error: Any = None


def answers(client: TestClient, *, stream: bool) -> list[Reply]:
    """To eight requests at once."""

    async def all_of_them() -> list[Reply]:
        asked = (asyncio.to_thread(answer, client, row, stream=stream) for row in range(ROWS))
        return await asyncio.gather(*asked)

    return asyncio.run(all_of_them())


def answer(client: TestClient, row: int, *, stream: bool) -> Reply:
    response = client.post(CHAT, json=body(row, stream=stream))
    if not stream:
        found = response.json()
        if "error" in found:
            return Reply(response.status_code, error=found["error"])
        return Reply(response.status_code, found["choices"][0]["message"]["content"])
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    reported = Reply(response.status_code)
    for chunk in map(json.loads, lines):
        if "error" in chunk:
            reported.error = chunk["error"]
        else:
            reported.text += chunk["choices"][0]["delta"].get("content") or ""
    return reported


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
    assert all(each.status == 200 and each.text for each in reported)
    assert [each.text for each in answers(client, stream=True)] == [each.text for each in reported]
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
    poisoned, wanted = reported.pop(POISONED), list(unharmed)
    assert wanted.pop(POISONED).text.startswith(poisoned.text)
    assert reported == wanted
    assert (poisoned.status, poisoned.error["code"]) == (200 if stream else 500, "internal_error")
    assert "secret" not in str(poisoned.error)
    assert client.get("/v1/pool").json()["memory"]["kv_reserved"] == 0
    assert client.get("/health").status_code == 200
