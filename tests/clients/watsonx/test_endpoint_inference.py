"""Another server's endpoint in the shapes of IBM's client."""

from typing import Any

import pytest

from mlx_server.errors import BadRequest
from tests.clients.recorded import WEATHER, chunks, completion, recorded
from tests.clients.watsonx.made import ANSWERED, ASKED, LEAKED, at


def test_another_endpoint_answers_in_ibms_shape() -> None:
    with recorded(completion(LEAKED), chunks({"content": "It rains."})) as server:
        model = at(server.url, params={"max_tokens": 5})
        found = model.chat(ASKED, tools=[WEATHER], tool_choice_option="required")
        stream = list(model.chat_stream(ASKED))
    assert found["model_id"] == "m"
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in stream) == "It rains."
    asked, _ = server.requests
    assert (asked["model"], asked["max_tokens"], asked["tool_choice"]) == ("m", 5, "required")
    assert server.keys == ["Bearer secret"] * 2


def test_another_endpoint_generates_text_too() -> None:
    choice = {"index": 0, "text": f"{ANSWERED}It rains.", "finish_reason": "length"}
    body = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    params = {"decoding_method": "greedy", "max_new_tokens": 4, "stop_sequences": ["x"]}
    with recorded(body, body, [body]) as server:
        model = at(server.url)
        assert model.generate_text("It", params=params) == "It rains."
        [result] = model.generate_text("It", raw_response=True)["results"]
        assert "".join(model.generate_text_stream("It")) == "It rains."
    assert result == {
        "generated_text": "It rains.",
        "generated_token_count": 4,
        "input_token_count": 3,
        "stop_reason": "max_tokens",
    }
    assert server.requests[0] == {
        "model": "m",
        "prompt": "It",
        "temperature": 0,
        "max_tokens": 4,
        "stop": ["x"],
    }
    assert server.paths == ["/v1/completions"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "mistral", "smollm2"])
@pytest.mark.parametrize("owner", ["vllm", "llamacpp", 5])
def test_a_text_has_the_delimiters_of_its_thoughts_where_the_server_can(
    owner: Any, family: str
) -> None:
    said = {
        "qwen3": "<think>Rain?</think>It rains.",
        "gpt_oss": f"{ANSWERED}It rains.",
        "mistral": "[THINK]Rain?[/THINK]It rains.",
        "smollm2": "It rains.",
    }
    choices = [{"text": said[family], "finish_reason": "stop"}]
    with recorded({"choices": choices}, [{"choices": choices}]) as server:
        server.models = {"data": [{"id": "other"}, {"id": "m", "owned_by": owner}]}
        model = at(server.url, family=family)
        assert model.generate_text("It") == "It rains."
        assert "".join(model.generate_text_stream("It")) == "It rains."
    can = owner == "vllm" and family != "smollm2"
    fields = [each.get("skip_special_tokens") for each in server.requests]
    assert fields == [False if can else None] * 2
    assert server.lists == (family != "smollm2")  # once, and only where it matters


OPEN = "<|im_start|>user\nIt?<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "written", "text"),
    [
        (OPEN, "Rain?\n</think>\n\nIt rains.", "It rains."),
        (OPEN, "It rains.", "It rains."),  # the server sent no delimiters
        (OPEN, "", ""),
        (f"{OPEN}\n</think>\n\n", "It rains.", "It rains."),
        (f"{OPEN}\n</think>\n\n", "<think>Rain?</think>It rains.", "It rains."),
        ("Say <think> once.", "It rains.", "It rains."),
    ],
)
def test_a_thought_that_the_prompt_opens_is_no_text(prompt: str, written: str, text: str) -> None:
    cuts = [written[at : at + 3] for at in range(0, len(written), 3)]
    deltas = [{"choices": [{"text": cut, "finish_reason": None}]} for cut in cuts]
    ended = {"choices": [{"text": "", "finish_reason": "stop"}]}
    whole = {"choices": [{"text": written, "finish_reason": "stop"}]}
    with recorded(whole, whole, whole, [*deltas, ended]) as server:
        model = at(server.url, family="qwen3")
        assert model.generate_text(prompt) == text
        assert model.generate_text([prompt, "It"])[0] == text
        assert "".join(model.generate_text_stream(prompt)) == text


@pytest.mark.parametrize("models", [None, "{", "[" * 100_000, "", [], {"data": [5]}, 5])
def test_a_server_without_a_list_of_models_generates_text(models: Any) -> None:
    body = {"choices": [{"text": "It rains.", "finish_reason": "stop"}]}
    with recorded(body) as server:
        server.models = models
        assert at(server.url).generate_text("It") == "It rains."
    assert server.lists == 1
    assert "skip_special_tokens" not in server.requests[0]


def test_what_only_watsonx_has_is_refused_by_name_elsewhere() -> None:
    model = at("http://127.0.0.1:1/v1")
    with pytest.raises(BadRequest, match="guardrails"):
        model.generate_text("It", guardrails=True)
    with pytest.raises(BadRequest, match="truncate_input_tokens"):
        model.generate_text("It", params={"truncate_input_tokens": 5})
    with pytest.raises(BadRequest, match="context"):
        model.chat(ASKED, context="c")
