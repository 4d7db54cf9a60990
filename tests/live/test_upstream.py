"""A second instance of this server as the upstream: a client gets what it would get there."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.live.server import LiveServer, children, eventually, serving

ENTRIES = """\
- match: weather
  output: >-
    <|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant<|channel|>commentary
    to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}
- match: endless
  output: "<|channel|>final<|message|>{text}"
  delay_ms: 20
- output: >-
    <|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Paris.
"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer]]:
    """The one that has the model, and the gateway."""
    folder = tmp_path_factory.mktemp("upstream")
    (there := folder / "there").mkdir()
    (there / "said.yaml").write_text(ENTRIES.replace("{text}", "No end. " * 500), "utf-8")
    model = {"source": "replay:said.yaml", "family": "gpt_oss", "preload": True}
    with serving(there, {"models": {"oss": model}}) as upstream:
        source = {"source": f"openai+{upstream.url}/v1", "upstream_model": "oss"}
        config = {"models": {"cloud": {**source, "family": "gpt_oss"}}}
        with serving(folder / "here", config) as gateway:
            yield upstream, gateway


def said(client: OpenAI, model: str, text: str) -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": text}]
    found = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER])
    (choice,) = found.choices
    calls = [
        (call.function.name, call.function.arguments)
        for call in choice.message.tool_calls or ()
        if call.type == "function"
    ]
    usage = found.usage
    assert usage
    return {
        "text": choice.message.content,
        "reasoning": getattr(choice.message, "reasoning_content", None),
        "calls": calls,
        "finish": choice.finish_reason,
        "tokens": (usage.prompt_tokens, usage.completion_tokens),
        "warnings": getattr(found, "mlx_server", None),
    }


@pytest.mark.parametrize("text", ["capital", "weather"])
def test_the_same_answer(text: str, servers: tuple[LiveServer, LiveServer]) -> None:
    upstream, gateway = servers
    with upstream.openai() as there, gateway.openai() as here:
        assert said(here, "cloud", text) == said(there, "oss", text)


def test_there_is_no_engine(servers: tuple[LiveServer, LiveServer]) -> None:
    _, gateway = servers
    with gateway.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/v1/pool").json()["engine"] is None
    assert not any("worker" in " ".join(each.cmdline()) for each in children(gateway.process.pid))


def test_a_client_that_leaves_frees_the_upstream(servers: tuple[LiveServer, LiveServer]) -> None:
    upstream, gateway = servers
    messages: Any = [{"role": "user", "content": "endless"}]
    with gateway.openai() as client:
        stream = client.chat.completions.create(model="cloud", messages=messages, stream=True)
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        stream.close()
    eventually(upstream.idle, "the upstream's row ends")
