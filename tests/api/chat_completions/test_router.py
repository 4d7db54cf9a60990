"""Answers that fail, and clients that leave before their end."""

import logging
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mlx_server.errors import GenerationFailed
from tests.api import wire
from tests.api.chat_completions.bodies import BODY, HI, post
from tests.api.leaving import Leaver, Stage
from tests.api.wire import TEXT, ScriptedEngine, error, events

pytestmark = pytest.mark.usefixtures("_as_before")


def test_an_unknown_model_is_no_stream(client: TestClient) -> None:
    found = error(post(client, model="other", stream=True), status=404)
    assert (found["param"], found["code"]) == ("model", "model_not_found")


def test_too_long_a_prompt_is_no_stream(client: TestClient) -> None:
    found = error(post(client, messages=[{**HI, "content": "x" * 3000}], stream=True))
    assert (found["param"], found["code"]) == ("messages", "context_length_exceeded")


def test_a_failure_in_mid_stream_is_its_last_event(
    client: TestClient, engine: ScriptedEngine
) -> None:
    engine.failure = GenerationFailed("No more.")
    *chunks, last = events(post(client, stream=True))
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == TEXT[:3]
    assert wire.error_of(last)["code"] == "generation_failed"


def test_a_failure_before_the_end_of_an_answer_is_its_status(
    client: TestClient, engine: ScriptedEngine
) -> None:
    engine.failure = GenerationFailed("No more.")
    assert error(post(client), status=500)["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [True, False])
def test_a_mistake_of_ours_is_told_without_its_details(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("mlx_server.api.accumulator.Accumulator.add", broken)
    response = post(client, stream=stream)
    found = wire.error_of(events(response)[-1]) if stream else error(response, status=500)
    assert found["code"] == "internal_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_takes_its_rows_along(
    tiny_path: Path, caplog: pytest.LogCaptureFixture, n: int
) -> None:
    stage = Stage(tiny_path)

    with caplog.at_level(logging.INFO):
        stage.play(
            Leaver({**BODY, "n": n}, stage.engine.took),
            Leaver({**BODY, "n": n, "stream": True}, stage.engine.took),
            Leaver({**BODY, "n": n, "stream": True}),
        )
    assert len(stage.engine.taken) == 3 * n
    assert stage.free == [True] * 3
    access = [record.args for record in caplog.records if record.name == "mlx_server.access"]
    assert [args[2] for args in access if isinstance(args, tuple)] == ["gone"] * 3
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_rows_are_free_once_the_app_returns_even_if_nothing_was_sent(tiny_path: Path) -> None:
    stage = Stage(tiny_path)
    client = Leaver({**BODY, "stream": True}, stuck=True)
    stage.play(client)
    assert stage.engine.taken
    assert client.sent == []
    assert stage.free == [True]
