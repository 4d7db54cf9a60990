"""A model that sees, in a server: pictures in the prompt cache, and beside text."""

import base64
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from ollama import Client as Ollama
from openai import OpenAI

from mlx_server.clients.langchain import ChatMLX
from mlx_server.models.vision import can_see
from tests.live.common import Models, common_models
from tests.live.server import LiveServer, children, serving, start, stop
from tests.sandbox.test_pictures import HARMFUL, ODD
from tests.tiny_vision import tiny_vision

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
pytestmark = pytest.mark.skipif(not can_see(), reason="the extra `vision` is not installed")

SEES, HYBRID = "sees", "sees-with-states"
WHOLE = ("molmo2", "aya_vision", "paddleocr_vl", "kimi_k25", "zaya1_vl")
"""Whose pictures mlx-vlm's processors read."""


@common_models
def models(folder: Path, _: Mapping[str, Path]) -> Models:
    if not can_see():
        return {}
    families = {SEES: "qwen3_vl", HYBRID: "qwen3_5", **{name: name for name in WHOLE}}
    return {name: {"source": str(tiny_vision(folder / name, of))} for name, of in families.items()}


def picture(seed: int) -> dict[str, Any]:
    file = BytesIO()
    Image.effect_noise((90 + seed, 60), 100).convert("RGB").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def question(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What is this? " * 20}]}


def asked(client: OpenAI, model: str, messages: list[Any]) -> tuple[str, int, int]:
    """The answer, and the tokens of the prompt and those of them that were cached."""
    answer = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=8
    )
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    return str(answer.choices[0].message.content), answer.usage.prompt_tokens, cached


@pytest.mark.parametrize("model", [SEES, HYBRID, *WHOLE])
def test_a_picture_is_cached_and_no_other_one_is_taken_for_it(client: OpenAI, model: str) -> None:
    known: Any = client.models.retrieve(model)
    assert known.architecture["input_modalities"] == ["text", "image"]
    turn = [question(picture(0))]
    answer, tokens, cached = asked(client, model, turn)
    assert cached == 0
    again, _, cached = asked(client, model, turn)
    assert again == answer
    assert cached > 0.9 * tokens
    turn += [{"role": "assistant", "content": answer}, question()]
    _, _, cached = asked(client, model, turn)
    assert cached > 0.9 * tokens
    _, _, cached = asked(client, model, [question(picture(1))])
    assert cached < 30, "only what is before the picture"


@pytest.mark.parametrize("family", ["qwen3_vl", "zaya1_vl"])
def test_a_restart_keeps_what_was_computed_of_a_picture(tmp_path: Path, family: str) -> None:
    config = {"models": {SEES: {"source": str(tiny_vision(tmp_path / SEES, family))}}}
    turn = [question(picture(0))]
    server = start(tmp_path, config)
    with server.openai() as client:
        answer, tokens, cached = asked(client, SEES, turn)
    assert cached == 0
    stop(server)
    with serving(tmp_path, config) as server, server.openai() as client:
        _, _, cached = asked(client, SEES, [question(picture(1))])
        assert cached < 30, "another picture"
        again, _, cached = asked(client, SEES, turn)
    assert again == answer
    assert cached > 0.9 * tokens


def test_each_client_shows_the_same_picture(server: LiveServer, client: OpenAI) -> None:
    shown = picture(5)
    data = shown["image_url"]["url"].partition(",")[2]
    answer, tokens, _ = asked(client, SEES, [question(shown)])
    text = question()["content"][0]["text"]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    with server.anthropic() as anthropic:
        message = anthropic.messages.create(
            model=SEES,
            max_tokens=8,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": content}],
        )
    usage = message.usage
    read = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert usage.input_tokens + read == tokens
    assert "".join(each.text for each in message.content if each.type == "text") == answer
    with Ollama(server.url) as ollama:
        said = ollama.chat(
            SEES,
            [{"role": "user", "content": text, "images": [data]}],
            options={"temperature": 0, "num_predict": 8},
        )
    assert (said.message.content, said.prompt_eval_count) == (answer, tokens)
    responses = client.responses.create(
        model=SEES,
        temperature=0,
        max_output_tokens=8,
        input=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_image",
                        "image_url": shown["image_url"]["url"],
                        "detail": "auto",
                    },
                    {"type": "input_text", "text": text},
                ],
            }
        ],
    )
    assert responses.usage
    assert (responses.output_text, responses.usage.input_tokens) == (answer, tokens)


def read_by(message: AIMessage) -> int:
    assert message.usage_metadata
    return message.usage_metadata["input_tokens"]


def test_langchain_shows_pictures(server: LiveServer, client: OpenAI) -> None:
    shown = picture(6)
    data = shown["image_url"]["url"].partition(",")[2]
    text = question()["content"][0]
    answer, tokens, _ = asked(client, SEES, [question(shown)])
    model = ChatMLX(model=SEES, base_url=server.url, temperature=0, max_tokens=8)
    block = {"type": "image", "base64": data, "mime_type": "image/png"}
    old = {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"}
    for part in (block, old, shown):
        said = model.invoke([HumanMessage([part, text])])
        assert (said.content, read_by(said)) == (answer, tokens)
    call = {"id": "a", "name": "look", "args": {}}
    turn = [HumanMessage("look"), AIMessage("", tool_calls=[call])]
    tool = ToolMessage([block, text], tool_call_id="a")
    without = ToolMessage([text], tool_call_id="a")
    seen, blind = (read_by(model.invoke([*turn, each])) for each in (tool, without))
    assert seen - blind > 4


def test_harmful_files_are_answered_and_change_nothing(server: LiveServer, client: OpenAI) -> None:
    turn = [question(picture(7))]
    answer, *_ = asked(client, SEES, turn)
    files = [given if isinstance(given, bytes) else given() for given, _ in [*ODD, *HARMFUL]]
    assert len(files) >= 48
    with server.http() as http:
        before = 0
        for data in [files[0], *files]:
            url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            part = {"type": "image_url", "image_url": {"url": url}}
            body = {"model": SEES, "messages": [question(part)], "max_tokens": 1}
            response = http.post("/v1/chat/completions", json=body, timeout=60)
            assert response.status_code in (200, 400), response.text
            before = before or memory(server)
    assert asked(client, SEES, turn)[0] == answer
    assert memory(server) - before < 64 << 20


def memory(server: LiveServer) -> int:
    processes = [psutil.Process(server.process.pid), *children(server.process.pid)]
    return sum(process.memory_info().rss for process in processes)


def test_an_answer_about_a_picture_has_all_options(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    messages: Any = [question(picture(2)), question(picture(0))]
    answer_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(
        model=SEES,
        messages=messages,
        n=2,
        seed=3,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.5,
        max_tokens=40,
        response_format=answer_format,
    )
    assert len(answer.choices) == 2
    assert all(str(choice.message.content).startswith("{") for choice in answer.choices)
