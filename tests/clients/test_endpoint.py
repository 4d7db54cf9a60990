"""Requests to servers of OpenAI's API."""

import asyncio
from typing import Any
from unittest.mock import Mock

import openai
import pytest

from mlx_server.clients.endpoint import KEY_VARIABLE, Endpoint
from mlx_server.errors import BadRequest, GenerationFailed
from tests.clients.recorded import chunks, completion, recorded


def test_bodies_and_chunks_come_as_the_server_sends_them() -> None:
    answer, stream = completion("Yes.", reasoning="Hm."), chunks({"content": "Yes."})

    async def ask(endpoint: Endpoint) -> list[object]:
        return [await endpoint.asend({}), [each async for each in endpoint.astream({})]]

    with recorded(answer, stream, answer, stream) as server:
        endpoint = Endpoint(server.url)
        assert [endpoint.send({}), list(endpoint.stream({}))] == [answer, stream]
        assert asyncio.run(ask(endpoint)) == [answer, stream]
    assert [each.get("stream") for each in server.requests] == [None, True, None, True]


def options_of(monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint) -> dict[str, Any]:
    """What OpenAI's client and its HTTP client are made with."""
    options: dict[str, Any] = {}

    def client(**given: Any) -> Any:
        options.update(given)
        raise ConnectionAbortedError

    def http(**given: Any) -> Mock:
        options.update(given)
        return Mock()

    with monkeypatch.context() as patched:
        patched.setattr(openai, "DefaultHttpxClient", http)
        patched.setattr(openai, "OpenAI", client)
        with pytest.raises(ConnectionAbortedError):
            endpoint.send({})
    return options


def test_a_key_of_this_machine_goes_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "local")
    monkeypatch.setenv("OPENAI_API_KEY", "elsewhere")
    assert options_of(monkeypatch, Endpoint("http://localhost:1/v1"))["api_key"] == "local"
    assert options_of(monkeypatch, Endpoint("https://example.com/v1"))["api_key"] == "none"
    assert options_of(monkeypatch, Endpoint("http://[::1]:1/v1", "mine"))["api_key"] == "mine"


def test_only_requests_to_this_machine_do_without_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert options_of(monkeypatch, Endpoint("http://127.0.0.1:1/v1"))["verify"] is False
    elsewhere = options_of(monkeypatch, Endpoint("https://127.0.0.1.example.com/v1"))
    assert elsewhere["verify"] is not False


def test_what_is_no_url_or_no_answer_is_said() -> None:
    with pytest.raises(BadRequest, match="is not a URL"):
        Endpoint("localhost").send({})
    with recorded([[]]) as server, pytest.raises(GenerationFailed, match="format of OpenAI"):  # type: ignore[list-item]
        list(Endpoint(server.url).stream({}))
