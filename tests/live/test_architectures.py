"""Real architectures with tiny random weights, on a real server: everything a request may ask
for is computed, together, and whatever nonsense they say is an answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai.types.chat import ChatCompletion

from mlx_server.families import family_named
from mlx_server.sources.replay_checkpoint import TEMPLATE, built_in_tokenizer
from tests.live.common import Models, common_models
from tests.live.server import LiveServer
from tests.worker.kinds import CONFIGS, Kind

GOLDEN = Path(__file__).parents[1] / "families" / "golden"
TOOLS = yaml.safe_load((GOLDEN / "tools.yaml").read_text("utf-8"))

ARCHITECTURES = {
    **{name: CONFIGS[name] for name in ("gpt_oss", "qwen3", "glm4", "llama4", "gemma4")},
    "llama3": CONFIGS["llama"],
    "gemma3": CONFIGS["gemma3_text"],
}
"""By family."""

HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I should look.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
]

QUESTION = [{"role": "user", "content": "Hello"}]
TOKENS = 10

REQUESTS: list[dict[str, Any]] = [
    {"messages": QUESTION},
    {"messages": HISTORY, "tools": TOOLS},
    {"messages": HISTORY, "tools": TOOLS, "tool_choice": "none", "reasoning_effort": "low"},
    {"messages": QUESTION, "n": 3, "temperature": 1.3, "seed": 7, "top_p": 0.9, "top_k": 40},
    {"messages": QUESTION, "logprobs": True, "top_logprobs": 5, "temperature": 0},
    {"messages": QUESTION, "logit_bias": {"5": 20}, "presence_penalty": 1, "stop": ["a", "b"]},
    {"messages": QUESTION, "frequency_penalty": 1, "repetition_penalty": 1.2, "min_p": 0.05},
    {"messages": QUESTION, "tools": TOOLS, "parallel_tool_calls": False},
]


def save(folder: Path, name: str) -> Path:
    family = family_named(name)
    tokenizer = built_in_tokenizer(family)
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    # the head is wider than the tokenizer, as real ones are
    config = {**ARCHITECTURES[name], "vocab_size": vocabulary + 40}
    if text := config.get("text_config"):
        config["text_config"] = {**text, "vocab_size": vocabulary + 40}
    Kind(name, config).save(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = family.stop_tokens or ("<|endoftext|>",)
    tokens = {"eos_token": ends[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


@common_models
def models(folder: Path, _: object) -> Models:
    return {f"random-{name}": {"source": str(save(folder / name, name))} for name in NAMES}


NAMES = [name for name in ARCHITECTURES if name != "gpt_oss"]
"""Its vocabulary of 200,000 tokens takes longer than all others together."""


@pytest.mark.parametrize("name", NAMES)
def test_everything_together(server: LiveServer, name: str) -> None:
    model = f"random-{name}"

    async def all_of_it() -> None:
        # the first requests wait for a vocabulary of 200,000 tokens and its grammars
        async with server.openai_async(timeout=120) as client:
            asked = [
                client.chat.completions.create(
                    **{"model": model, "max_tokens": TOKENS, **standard(request)}, stream=stream
                )
                for request in REQUESTS
                for stream in (False, True)
            ]
            for answer in await asyncio.gather(*asked):
                if isinstance(answer, ChatCompletion):
                    assert answer.usage
                    assert 0 < answer.usage.completion_tokens <= TOKENS * len(answer.choices)
                    check([choice.message for choice in answer.choices], name)
                    ends = [choice.finish_reason for choice in answer.choices]
                else:
                    choices = [choice async for chunk in answer for choice in chunk.choices]
                    check([choice.delta for choice in choices], name)
                    ends = [choice.finish_reason for choice in choices if choice.finish_reason]
                assert set(ends) <= {"stop", "length", "tool_calls"}
                assert ends

    asyncio.run(all_of_it())
    with server.http() as http:
        found = {model["id"]: model for model in http.get("/v1/pool").json()["models"]}
        listed = http.get(f"/v1/models/{model}").json()
    assert found[model]["family"] == name
    assert found[model]["batching"] == listed["batching"] == (name != "llama4")


def test_a_model_that_can_t_batch_says_so_in_the_log(server: LiveServer) -> None:
    with server.openai() as client:
        client.completions.create(model="random-llama4", prompt="Hello", max_tokens=1)
    (line,) = {line for line in server.log.splitlines() if "one request at a time" in line}
    assert "mlx-lm can't batch its ChunkedKVCache" in line


def check(said: list[Any], name: str) -> None:
    """Random weights say control tokens all the time; the end of an answer is none of its text."""
    for part in said:
        reasoning = getattr(part, "reasoning_content", None)
        for token in family_named(name).stop_tokens:
            assert token not in (part.content or "") + (reasoning or "")


def standard(request: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's client has no argument for goes in its extra body."""
    ours = {"top_k", "min_p", "repetition_penalty"}
    extra = {key: value for key, value in request.items() if key in ours}
    rest = {key: value for key, value in request.items() if key not in ours}
    return {**rest, "extra_body": extra}
