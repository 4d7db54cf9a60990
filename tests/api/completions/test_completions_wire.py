from typing import Any

import httpx2
import pydantic
import pytest
from openai.types import Completion
from starlette.testclient import TestClient

from mlx_server.api.completions import CompletionBody
from tests.api import wire
from tests.api.strict import assert_strict
from tests.api.wire import TEXT, VOCABULARY, Json, ScriptedEngine, error, events, ok, streamed
from tests.tables import cases

PATH = "/v1/completions"
BODY: Json = {"model": wire.MODEL, "prompt": "ab", "max_tokens": 100}
IDS = [3, 4, 5]
IDS_TEXT = '!"#'


pytestmark = pytest.mark.usefixtures("_as_before")


def post(client: TestClient, **asked: Any) -> httpx2.Response:
    return client.post(PATH, json={**BODY, **asked})


def answer(client: TestClient, **asked: Any) -> Json:
    (choice,) = ok(post(client, **asked))["choices"]
    found: Json = choice
    return found


def refused(client: TestClient, **asked: Any) -> Json:
    return error(post(client, **asked))


def gathered(chunks: list[Json]) -> Json:
    """What a client makes of the chunks of a stream: the body of the answer that is not one."""
    *parts, last = chunks
    choices: dict[int, Json] = {}
    for part in parts:
        assert part["usage"] is None
        (choice,) = part["choices"]
        found = choices.setdefault(choice["index"], {"text": "", "logprobs": None})
        assert found.get("finish_reason") is None
        found["text"] += choice["text"]
        found["logprobs"] = joined(found["logprobs"], choice["logprobs"])
        found |= {"index": choice["index"], "finish_reason": choice["finish_reason"]}
    assert last["choices"] == []
    return {"choices": [choices[i] for i in sorted(choices)], "usage": last["usage"]}


def joined(one: Json | None, other: Json | None) -> Json | None:
    if one is None or other is None:
        return one or other
    return {key: (one[key] or []) + (other[key] or []) or None for key in one}


def as_typed(body: Json) -> Json:
    """With something in the places where OpenAI's own answers have null, against its types: the
    end of a chunk, and the first token of a prompt, which follows nothing."""
    for choice in body["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        logprobs = choice["logprobs"] or {}
        for name, something in (("token_logprobs", 0.0), ("top_logprobs", {})):
            if (logprobs.get(name) or [something])[0] is None:
                logprobs[name][0] = something
    return body


@cases
def test_bodies_and_chunks_are_what_the_sdk_expects(client: TestClient, asked: Json) -> None:
    body = ok(post(client, **asked))
    chunks = events(post(client, **streamed(asked)))
    whole = {key: body[key] for key in ("choices", "usage")}
    for choice in whole["choices"]:
        if choice["logprobs"]:  # an empty list is as good as none, and streams say none
            choice["logprobs"] = joined(choice["logprobs"], dict.fromkeys(choice["logprobs"]))
    assert gathered(chunks) == whole
    assert_strict(Completion, as_typed(body))
    for chunk in chunks:
        assert_strict(Completion, as_typed(chunk))
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_sixteen_tokens_unless_more_are_asked_for(client: TestClient) -> None:
    body = ok(post(client, max_tokens=None))
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        (IDS, [IDS_TEXT]),
        ([IDS, [4]], [IDS_TEXT, '"']),
        ([VOCABULARY - 1], [""]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_prompts_of_all_shapes(client: TestClient, prompt: Any, prompts: list[str], n: int) -> None:
    choices = ok(post(client, prompt=prompt, echo=True, n=n))["choices"]
    expected = [text + TEXT for text in prompts for _ in range(n)]
    assert [choice["text"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == list(range(len(expected)))


def test_more_answers_than_there_is_room_for(client: TestClient) -> None:
    assert "this server allows 80" in refused(client, prompt=["a"] * 128)["message"]
    assert "this server allows 80" in refused(client, prompt=["a"] * 6, n=16)["message"]


@pytest.mark.parametrize("value", [0, [0], "0"])
@pytest.mark.parametrize("prompt", ["a", "", [1]])
def test_wrong_items_deep_in_a_prompt_are_reported_once(prompt: Any, value: Any) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        CompletionBody.model_validate({**BODY, "prompt": [prompt, *[value] * 500, None]})
    assert caught.value.error_count() < 10


def test_an_echo_without_log_probabilities_begins_the_text(client: TestClient) -> None:
    choice = answer(client, echo=True, max_tokens=4)
    assert (choice["text"], choice["finish_reason"]) == ("abSal", "length")


def test_an_echo_with_log_probabilities_has_the_prompts_own(client: TestClient) -> None:
    choice = answer(client, echo=True, logprobs=2, max_tokens=3)
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "b", "S", "a", "l"]
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"b": -0.5, "c": -1.5}
    assert found["text_offset"] == [0, 1, 2, 3, 4]


def test_only_the_prompt(client: TestClient, engine: ScriptedEngine) -> None:
    body = ok(post(client, echo=True, max_tokens=0))
    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert engine.taken[-1].max_tokens == 0


def test_alternatives_are_there_only_if_asked_for(client: TestClient) -> None:
    assert answer(client, logprobs=0)["logprobs"]["top_logprobs"] is None
    tops = answer(client, logprobs=2, max_tokens=1)["logprobs"]["top_logprobs"]
    assert tops == [{"S": -0.5, "T": -1.5}]


def test_what_is_taken_though_it_says_little(client: TestClient) -> None:
    response = post(client, best_of=2, n=2, user="me", mirostat=1)
    assert len(ok(response)["choices"]) == 2
    assert response.headers["x-mlx-server-ignored"] == "mirostat"
