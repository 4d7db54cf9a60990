"""Another server's endpoint in the shapes of IBM's client."""

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


def test_what_only_watsonx_has_is_refused_by_name_elsewhere() -> None:
    model = at("http://127.0.0.1:1/v1")
    with pytest.raises(BadRequest, match="guardrails"):
        model.generate_text("It", guardrails=True)
    with pytest.raises(BadRequest, match="truncate_input_tokens"):
        model.generate_text("It", params={"truncate_input_tokens": 5})
    with pytest.raises(BadRequest, match="context"):
        model.chat(ASKED, context="c")
