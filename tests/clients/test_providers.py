"""One configuration for a model, wherever it runs."""

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import openai
import pytest

from mlx_server.clients.endpoint import KEY_VARIABLE, Endpoint
from mlx_server.clients.providers import LLMProvider, ProviderConfig, load_providers
from mlx_server.errors import BadRequest, GenerationFailed, SettingsError
from tests.clients.recorded import WEATHER, Wire, call, chunks, completion, recorded
from tests.tables import cases

PARIS = '{"city": "Paris"}'
HERMES = f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
TWO_PASS = {"two_pass": True, "max_thinking_tokens": 8, "max_response_tokens": 50}


def provider(url: str, **config: Any) -> LLMProvider:
    given = {"name": "p", "model_name": "m", "base_url": url, "retries": 0, **config}
    return LLMProvider(msgspec.convert(given, ProviderConfig))


THINKING: dict[str, list[Wire]] = {
    "mlx_server": [completion("It rains.", reasoning_content="Paris?")],
    "openrouter": [completion("It rains.", reasoning="Paris?")],
    "vllm": [completion("<think>Paris?", reason="length"), completion("It rains.")],
    "llama_cpp": [
        completion("", reasoning_content="Paris?", reason="length"),
        completion("It rains."),
    ],
}


@pytest.mark.parametrize("backend", THINKING)
def test_every_backend_gives_the_same_answer_within_the_same_limits(backend: str) -> None:
    with recorded(*THINKING[backend]) as server:
        asked = provider(server.url, provider=backend, generation_config=TWO_PASS)
        found = asked.invoke("What is the weather?")
    assert found == {"response": "It rains.", "thinking": "Paris?"}
    first, last = server.requests[0], server.requests[-1]
    limit = {
        "mlx_server": first.get("thinking_budget"),
        "openrouter": first.get("reasoning", {}).get("max_tokens"),
    }.get(backend, first.get("max_tokens"))
    assert limit == 8
    response = last.get("max_response_tokens", last.get("max_tokens"))
    assert response == (58 if backend == "openrouter" else 50)


CALLING: dict[str, list[Wire]] = {
    "mlx_server": [completion("Let me see.", tool_calls=[call("get_weather", PARIS)])],
    "vllm": [completion("<think>Paris?", reason="length"), completion(HERMES)],
    "openai": [completion("Let me see.", tool_calls=[call("get_weather", {"city": "Paris"})])],
}


@pytest.mark.parametrize("parser", ["openai", "hermes"])
@pytest.mark.parametrize("backend", CALLING)
def test_every_backend_selects_the_same_tool(backend: str, parser: str) -> None:
    generation = TWO_PASS if backend == "vllm" else {}
    with recorded(*CALLING[backend]) as server:
        asked = provider(
            server.url, provider=backend, tool_parser=parser, generation_config=generation
        )
        found = asked.invoke_tools("What is the weather?", [WEATHER])
    assert found["response"] == "Let me see."
    [made] = found["tool_calls"]
    assert (made["name"], made["arguments"]) == ("get_weather", PARIS)
    are_in_prompt = parser == "hermes" and backend != "mlx_server"
    assert ("tools" in server.requests[-1]) != are_in_prompt
    assert ("<tools>" in str(server.requests[-1]["messages"])) == are_in_prompt


def test_invoke_is_awaited_too() -> None:
    with recorded(completion("<think>Why?</think>Yes.")) as server:
        found = asyncio.run(provider(server.url, provider="openai").ainvoke("Is it?"))
    assert found == {"response": "Yes.", "thinking": "Why?"}


@cases
def test_a_content_is_parsed_as_configured(
    content: str, format: str, response: str, thinking: str
) -> None:
    found = provider("http://127.0.0.1:1/v1", parsing_format=format).parse_response(content)
    assert (found["response"], found["thinking"]) == (response, thinking)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"provider": "openai", "generation_config": TWO_PASS}, "no limit of thoughts"),
        ({"generation_config": {"max_response_tokens": 5}}, "two_pass is false"),
        ({"generation_config": {"two_pass": True}}, "two_pass needs max_thinking_tokens"),
    ],
)
def test_what_a_backend_can_not_do_is_an_error_at_once(config: Wire, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        provider("http://127.0.0.1:1/v1", **config)


def test_keys_come_from_the_environment_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "local")
    monkeypatch.setenv("CLOUD_KEY", "secret")
    with recorded(completion("Yes."), completion("Yes.")) as server:
        provider(server.url).invoke("Is it?")
        provider(server.url, api_key_env="CLOUD_KEY").invoke("Is it?")
        with pytest.raises(SettingsError, match="takes its key from NO_KEY"):
            provider(server.url, api_key_env="NO_KEY").invoke("Is it?")
    assert server.keys == ["Bearer local", "Bearer secret"]


def test_an_answer_without_choices_is_an_error_of_the_server() -> None:
    with recorded({"choices": None}) as server, pytest.raises(GenerationFailed, match="choices"):
        provider(server.url).invoke("Is it?")


def test_providers_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "providers:\n"
        "  - {name: here, model_name: qwen3, generation_config: {two_pass: true,\n"
        "     max_thinking_tokens: 100}}\n"
        "  - {name: there, model_name: gpt-oss, provider: openrouter, api_key_env: KEY}\n"
    )
    found = load_providers(str(file))
    assert [each.url for each in found.values()] == [
        "http://127.0.0.1:8000/v1",
        "https://openrouter.ai/api/v1",
    ]


@cases
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=why):
        load_providers(file)


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
