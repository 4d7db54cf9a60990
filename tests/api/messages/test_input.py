"""What a body becomes: the conversation that families render, and how it is answered."""

from typing import Any

import pytest

from mlx_server.api.messages.input import to_request
from mlx_server.api.messages.protocol import PromptBody
from mlx_server.http.security import Signer
from mlx_server.messages import Conversation, Message
from mlx_server.requests import JsonFormat
from tests.api.messages.bodies import (
    CACHED,
    HI,
    SCHEMA,
    SIGNER,
    TOOL,
    assistant,
    conversation,
    messages,
    parsed,
    refused,
    text,
    thinking,
    use,
    user,
)
from tests.api.wire import Json

# The system prompt


@pytest.mark.parametrize(
    "system",
    [
        "A\nB",
        [text("A"), text("B")],
        [text("A", **CACHED), text("B", citations=None)],
        [text(""), text("A\nB")],
    ],
)
def test_the_system_prompt_does_not_depend_on_its_form(system: Any) -> None:
    assert conversation(system=system).messages[0] == Message("system", "A\nB")


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
def test_no_system_prompt(system: Any) -> None:
    assert conversation(system=system).messages == (Message("user", "hi"),)


def test_a_system_message_stays_in_its_place_in_either_form() -> None:
    """Claude Code sends it as a list in one turn and as a string in the next."""
    agents = "Available agents: none."
    as_list = messages(HI, {"role": "system", "content": [text(agents, **CACHED)]})
    as_text = messages(
        HI, {"role": "system", "content": agents}, assistant(text("ho")), user(text("then?"))
    )
    assert as_list == (Message("user", "hi"), Message("system", agents))
    assert as_text[:2] == as_list


def test_a_system_message_that_is_cleared() -> None:
    once = {"role": "system", "content": "now", "clear_at": "next_user_message"}
    assert messages(HI, once) == (Message("user", "hi"), Message("system", "now"))
    assert messages(HI, once, assistant(text("ho")), HI) == (
        Message("user", "hi"),
        Message("assistant", "ho"),
        Message("user", "hi"),
    )


def test_our_own_thoughts_come_back_as_they_were() -> None:
    found = parsed(messages=[HI, assistant(thinking("Hm."), text("a"))])
    assert found.ignored == ()


@pytest.mark.parametrize(
    "signature", ["", "EqQBCgIYAhIM", "mlx1.AAAA", "mlx1.é", "mlx2.", "mlx1.="]
)
def test_a_foreign_thought_is_a_thought(signature: str) -> None:
    found = parsed(messages=[HI, assistant(thinking("Hm.", signature), text("a"))])
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1] == Message("assistant", "a", reasoning="Hm.")
    assert found.ignored == ("messages.content.signature",)


def test_a_thought_that_was_changed_is_told() -> None:
    changed = thinking("Hm?", SIGNER.sign("Hm."))
    assert parsed(messages=[HI, assistant(changed)]).ignored == ("messages.content.signature",)


def test_an_omitted_thought_is_in_its_signature() -> None:
    sealed = thinking("", SIGNER.seal("Hm, 世界."))
    found = parsed(messages=[HI, assistant(sealed, text("a"))])
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1].reasoning == "Hm, 世界."
    assert found.ignored == ()


def test_an_omitted_thought_of_another_server_is_dropped() -> None:
    sealed = thinking("", Signer(b"other").seal("Hm."))
    found = parsed(messages=[HI, assistant(sealed, text("a"))])
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1] == Message("assistant", "a")
    assert found.ignored == ("messages.content.signature",)


@pytest.mark.parametrize("name", ["output_config.format", "output_format"])
def test_a_schema_is_held(name: str) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    asked = {"output_config": {"format": format}} if "." in name else {name: format}
    request = parsed(**asked).request
    assert request.format == JsonFormat(SCHEMA, strict=True)
    assert request.format_param == f"{name}.schema"


def test_two_schemas_are_one_too_many() -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    assert "both" in refused(output_config={"format": format}, output_format=format).message


def test_the_rest_of_the_request() -> None:
    request = parsed(
        temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["a"], seed=3, adapter="x"
    ).request
    assert request.choices == {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    assert (request.stop, request.seed, request.adapter) == (("a",), 3, "x")
    assert (request.max_tokens, request.buffered, request.progress) == (9, True, False)
    request = parsed(stream=True, max_tokens=0).request
    assert (request.max_tokens, request.buffered, request.progress) == (1, False, True)


@pytest.mark.parametrize(
    "asked",
    [
        {"cache_control": {"type": "ephemeral"}},
        {"system": [text("A", **CACHED)]},
        {"messages": [user(text("a", **CACHED))]},
        {"tools": [{**TOOL, **CACHED}]},
    ],
)
def test_a_request_to_keep_the_prompt(asked: Json) -> None:
    assert parsed(**asked).stores_prompt
    assert not parsed(tools=[TOOL], system=[text("A", cache_control=None)]).stores_prompt


def test_a_body_to_count() -> None:
    body = PromptBody.model_validate({"model": "m", "messages": [HI]})
    assert to_request(body, SIGNER).request.max_tokens is None


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        (assistant(text("The best answer is (")), True),
        ({"role": "assistant", "content": "Yes, "}, True),
        (assistant(thinking("Hm."), text("Yes, ")), True),
        (assistant(use("1")), False),
        (assistant(text("I look."), use("1")), False),
        ({"role": "assistant", "content": ""}, False),
        (HI, False),
        ({"role": "system", "content": "Go on."}, False),
    ],
)
def test_an_answer_that_the_client_has_begun_is_continued(last: Json, continues: bool) -> None:
    assert conversation(messages=[HI, last]).continue_final_message == continues
