"""What clients send, as what the model is asked."""

from typing import Any

import pytest

from mlx_server.api.responses.input import input_items, to_request
from mlx_server.errors import NotFound
from mlx_server.messages import Conversation, Message
from mlx_server.requests import Approval, ChoiceFormat, JsonFormat
from tests.api.responses.bodies import (
    ASKED,
    ASSISTANT,
    CALL,
    DENIED,
    GRANTED,
    RESULT,
    SIGNER,
    TURNS,
    USER,
    USER_SAID,
    F,
    Json,
    asked,
    body,
    conversation,
    messages,
    refused,
    unknown,
)


def test_text_is_what_the_user_says() -> None:
    assert conversation(input="hi").messages == (USER_SAID,)


@pytest.mark.parametrize(
    "content",
    [
        "hi",
        [{"type": "input_text", "text": "hi"}],
        [{"type": "text", "text": "hi"}],
        [{"type": "output_text", "text": "hi", "annotations": None, "logprobs": None}],
        [{"type": "refusal", "refusal": "hi"}],
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
@pytest.mark.parametrize(
    "more", [{}, {"type": "message"}, {"type": None, "id": None, "status": None}]
)
def test_messages(role: Any, content: Any, more: Json) -> None:
    assert messages({"role": role, "content": content, **more}) == [Message(role, "hi")]


def test_parts_of_a_message_are_told_one_by_one_from_each_other() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages({"role": "user", "content": parts}) == [Message("user", "a\nb")]
    assert messages({"role": "user", "content": None}) == [Message("user", "")]


def test_the_call_may_be_an_earlier_one() -> None:
    first, second = conversation([CALL], input=[RESULT]).messages
    assert (first.tool_calls, second.tool_call_id) == ((F,), "c1")


def test_instructions_are_this_requests_alone_and_come_first() -> None:
    found = conversation([USER, ASSISTANT], input="hi", instructions="Be kind.").messages
    assert found[0] == Message("system", "Be kind.")
    assert [m.role for m in found[1:]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("nothing", [None, []])
def test_there_has_to_be_something_to_answer(nothing: Any) -> None:
    assert refused(input=nothing).param == "input"
    assert conversation([USER], input=nothing).messages == (USER_SAID,)
    assert conversation(input=nothing, instructions="Go.").messages == (Message("system", "Go."),)


def test_references() -> None:
    found = body(input=[{"id": "msg_1"}, {"type": "item_reference", "id": "fc_1"}, USER, RESULT])
    items = input_items(found, {"msg_1": ASSISTANT, "fc_1": CALL}.__getitem__)
    assert [item.type for item in items] == [
        "message",
        "function_call",
        "message",
        "function_call_output",
    ]
    with pytest.raises(NotFound, match="msg_1"):
        input_items(found, unknown)


def test_answers_to_requests_are_handed_on() -> None:
    granted = Approval("mcpr_1", "docs", "find", "{}", approve=True)
    docs = [{"type": "mcp", "server_label": "docs", "server_url": "https://example.com"}]
    assert asked([USER, ASKED], input=[GRANTED], tools=docs)[1].approvals == (granted,)
    denied = Approval("mcpr_1", "docs", "find", "{}", approve=False, reason="Not now")
    assert asked([USER, ASKED], input=[DENIED, USER], tools=docs)[1].approvals == (denied,)


@pytest.mark.parametrize("items", TURNS.values(), ids=TURNS)
def test_those_that_the_model_has_heard_of_are_not(items: tuple[list[Json], Any]) -> None:
    assert asked(input=items[0])[1].approvals == ()


@pytest.mark.parametrize("items", [[GRANTED], [ASKED, GRANTED, GRANTED], [GRANTED, ASKED]])
def test_an_answer_without_its_request_is_reported(items: list[Json]) -> None:
    docs = {"type": "mcp", "server_label": "docs", "server_url": "https://example.com"}
    found = body(input=[USER, *items], tools=[docs])
    made = to_request(found, input_items(found, unknown), opened=dict[str, str]().get)
    assert made.ignored == ("input.approval_request_id",)
    assert len(made.mcp.approvals) == items.count(ASKED) - (items[-1] == ASKED)


def test_what_the_engine_is_asked() -> None:
    request, mcp = asked(
        max_output_tokens=5,
        max_response_tokens=4,
        max_tool_calls=3,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.5,
        seed=1,
        stop=["a"],
        adapter="french",
        adapter_scale=0.5,
        top_logprobs=2,
        parallel_tool_calls=False,
        thinking_budget=7,
        reasoning={"effort": "high"},
        chat_template_kwargs={"x": 1},
    )
    (prompt,) = request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.template_kwargs == {"reasoning_effort": "high", "thinking_budget": 7, "x": 1}
    assert mcp.max_calls == 3
    assert (request.max_tokens, request.max_response_tokens, request.thinking_budget) == (5, 4, 7)
    assert (request.seed, request.stop, request.logprobs) == (1, ("a",), 2)
    assert (request.adapter, request.adapter_scale) == ("french", 0.5)
    assert (request.parallel_calls, request.buffered) == (False, True)
    assert set(request.choices) == {"temperature", "top_p", "top_k", "min_p", "presence_penalty"}


@pytest.mark.parametrize(
    ("given", "logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_log_probabilities(given: Json, logprobs: int | None) -> None:
    assert asked(**given)[0].logprobs == logprobs


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


AS_JSON = {"type": "json_schema", "name": "sums", "schema": SCHEMA, "strict": True}


def test_formats() -> None:
    request, _ = asked(text={"format": AS_JSON, "verbosity": None})
    assert request.format == JsonFormat(SCHEMA, strict=True, name="sums")
    assert request.format_param == "text.format.schema"
    assert asked(text={"format": {"type": "json_object"}})[0].format == JsonFormat()
    assert asked(text={"format": {"type": "text"}})[0].format is None
    assert asked(structured_outputs={"choice": ["a", "b"]})[0].format == ChoiceFormat(("a", "b"))
    error = refused(text={"format": AS_JSON}, structured_outputs={"regex": "a"})
    assert error.param == "structured_outputs.regex"


def test_truncation() -> None:
    for given, truncates in [(None, False), ("disabled", False), ("auto", True)]:
        found = body(truncation=given)
        made = to_request(found, input_items(found, unknown), opened=SIGNER.opened)
        assert made.truncates is truncates


def test_two_budgets() -> None:
    assert asked(chat_template_kwargs={"thinking_budget": 3})[0].thinking_budget == 3
    error = refused(chat_template_kwargs={"thinking_budget": 3}, thinking_budget=3)
    assert error.param == "chat_template_kwargs.thinking_budget"
