"""What a body becomes: the conversation that families render, its tools, and how it is answered."""

import base64
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.api import native
from mlx_server.api.chat_completions import input as chat_completions
from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.messages.answer import MessagesOutput, OutputOptions
from mlx_server.api.messages.input import (
    MessagesBody,
    ParsedMessagesRequest,
    PromptBody,
    to_request,
)
from mlx_server.api.native import NativeBody
from mlx_server.errors import BadRequest
from mlx_server.events import (
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    Repaired,
    Started,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.http.security import Signer
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import JsonFormat, NamedTool
from tests.api.folding import body_of, chunks_of
from tests.api.messages.talking import assert_event, assert_message, gathered, nameless
from tests.api.wire import Json
from tests.sandbox.pdf_files import pdf
from tests.tables import cases, messages_of

SIGNER = Signer(b"key")
HI: Json = {"role": "user", "content": "hi"}
CACHED: Json = {"cache_control": {"type": "ephemeral"}}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Json = {"name": "f", "description": "does f", "input_schema": SCHEMA}
LATER: Json = {**TOOL, "name": "later", "defer_loading": True}
LAST: Json = {**TOOL, "name": "last", "defer_loading": True}
USER_SAID = Message("user", "hi")


def parsed(**asked: Any) -> ParsedMessagesRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [HI], **asked}
    return to_request(MessagesBody.model_validate(body), SIGNER)


def conversation(**asked: Any) -> Conversation:
    (prompt,) = parsed(**asked).request.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def messages(*given: Json, **asked: Any) -> tuple[Message, ...]:
    return conversation(messages=list(given), **asked).messages


def refused(**asked: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parsed(**asked)
    return caught.value


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def system(content: Any) -> Json:
    return {"role": "system", "content": content}


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def use(id: str, name: str = "f", **input: Any) -> Json:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def result(id: str, content: Any = "done", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def thinking(words: str, signature: str | None = None) -> Json:
    signed = SIGNER.sign(words) if signature is None else signature
    return {"type": "thinking", "thinking": words, "signature": signed}


def answer(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message("assistant", content, reasoning=reasoning, tool_calls=calls)


def tool(content: str, id: str = "1") -> Message:
    return Message("tool", content, tool_call_id=id)


@cases
def test_blocks_become_turns(given: list[Json], turns: list[Json]) -> None:
    """Results stand before text, as many templates have no place for ids, and Claude Code sorts
    them by their time. It sends a system message as a list once and as a string in the next."""
    assert messages(*given) == messages_of(turns)


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [("application/pdf", pdf("It rains."), "It rains."), ("text/plain", b"It snows.", "It snows.")],
)
def test_documents_in_base64_are_read(kind: str, data: bytes, said: str) -> None:
    source = {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
    (message,) = messages(user({"type": "document", "source": source, "title": "Weather"}))
    assert said in message.content
    assert "Weather" in message.content


@cases
def test_blocks_that_mean_nothing_here_are_left_out_and_listed(block: Json, name: str) -> None:
    found = parsed(messages=[HI, assistant(block, text("So.")), HI], tools=[TOOL])
    assert found.ignored == (f"messages.content.{name}",)
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1] == Message("assistant", "So.")
    assert [tool.name for tool in prompt.tools] == ["f"]


def test_a_conversation_without_content_is_refused() -> None:
    assert refused(messages=[system([])]).param == "messages"


@pytest.mark.parametrize(
    "given", ["A\nB", [text("A", **CACHED), text("B", citations=None)], [text(""), text("A\nB")]]
)
def test_the_system_prompt_does_not_depend_on_its_form(given: Any) -> None:
    assert conversation(system=given).messages[0] == Message("system", "A\nB")


@pytest.mark.parametrize("given", [None, "", [], [text("")]])
def test_no_system_prompt(given: Any) -> None:
    assert conversation(system=given).messages == (USER_SAID,)


@pytest.mark.parametrize(
    ("block", "reasoning", "is_own"),
    [
        (thinking("Hm."), "Hm.", True),
        (thinking("", SIGNER.seal("Hm, 世界.")), "Hm, 世界.", True),
        (thinking("Hm?", SIGNER.sign("Hm.")), "Hm?", False),  # it was changed
        (thinking("Hm.", ""), "Hm.", False),
        (thinking("Hm.", "EqQBCgIYAhIM"), "Hm.", False),
        (thinking("", Signer(b"other").seal("Hm.")), None, False),
    ],
)
def test_thoughts_come_back(block: Json, reasoning: str | None, is_own: bool) -> None:
    found = parsed(messages=[HI, assistant(block, text("a"))])
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1] == answer("a", reasoning=reasoning)
    assert found.ignored == (() if is_own else ("messages.content.signature",))


@cases
def test_an_answer_that_the_client_has_begun_is_continued(last: Json, continues: bool) -> None:
    assert conversation(messages=[HI, last]).continue_final_message == continues


# Thinking, format and the rest


@cases
def test_thinking(asked: Json, kwargs: Json, budget: int | None) -> None:
    found = parsed(**asked)
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert (prompt.template_kwargs, found.request.thinking_budget) == (kwargs, budget)
    has_effort = "output_config" in asked
    assert found.request.implied == (frozenset() if has_effort else {"reasoning_effort"})
    assert found.ignored == ()


def test_a_system_message_sets_the_effort_from_there_on_and_may_hold_for_one_turn() -> None:
    hurry = {**system("Hurry."), "clear_at": "next_user_message"}
    slower = {**system([]), "output_config": {"effort": "high"}}
    given = (HI, hurry, {**hurry, "output_config": {"effort": "low"}})
    assert messages(*given, HI, hurry) == (USER_SAID, USER_SAID, Message("system", "Hurry."))
    assert conversation(messages=[*given, HI]).template_kwargs == {"reasoning_effort": "low"}
    later = conversation(messages=[*given, slower, HI], output_config={"effort": "max"})
    assert later.template_kwargs == {"reasoning_effort": "high"}
    assert parsed(messages=[HI, {**hurry, "clear_at": "later"}]).ignored == ("messages.clear_at",)


def test_an_effort_without_thinking_is_listed() -> None:
    effort = {"output_config": {"effort": "high"}}
    unwanted = {"thinking": {"type": "disabled"}, **effort}
    found = parsed(messages=[HI, {**system("Go."), **effort}], **unwanted)
    assert found.ignored == ("output_config.effort", "messages.output_config.effort")


@pytest.mark.parametrize("asked", [{"type": "enabled"}, {"type": "adaptive", "budget_tokens": 5}])
def test_a_budget_is_of_enabled_thinking(asked: Json) -> None:
    assert refused(thinking=asked).param == "thinking.budget_tokens"


@pytest.mark.parametrize("name", ["output_config.format", "output_format"])
def test_a_schema_is_held(name: str) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    asked = {"output_config": {"format": format}} if "." in name else {name: format}
    request = parsed(**asked).request
    assert request.format == JsonFormat(SCHEMA, strict=True)
    assert request.format_param == f"{name}.schema"
    both = {"output_config": {"format": format}, "output_format": format}
    assert "both" in refused(**both).message


def test_the_rest_of_the_request() -> None:
    request = parsed(
        temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["a"], seed=3, adapter="x"
    ).request
    assert request.choices == {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    assert (request.stop, request.seed, request.adapter) == (("a",), 3, "x")
    assert (request.max_tokens, request.buffered, request.progress) == (9, True, False)
    request = parsed(stream=True, max_tokens=0).request
    assert (request.max_tokens, request.buffered, request.progress) == (1, False, True)
    counted = PromptBody.model_validate({"model": "m", "messages": [HI]})
    assert to_request(counted, SIGNER).request.max_tokens is None


@pytest.mark.parametrize(
    "asked",
    [
        CACHED,
        {"system": [text("A", **CACHED)]},
        {"messages": [user(text("a", **CACHED))]},
        {"tools": [{**TOOL, **CACHED}]},
    ],
)
def test_a_request_to_keep_the_prompt(asked: Json) -> None:
    assert parsed(**asked).stores_prompt
    assert not parsed(tools=[TOOL], system=[text("A", cache_control=None)]).stores_prompt


# Tools


def test_tools() -> None:
    found = conversation(tools=[{**TOOL, **CACHED}, {**TOOL, "name": "g", "type": "custom"}])
    assert found.tools == (Tool("f", "does f", SCHEMA), Tool("g", "does f", SCHEMA))
    assert conversation(tools=[{**TOOL, "strict": True}]).tools[0].strict


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, NamedTool("f")),
    ],
)
def test_choices(choice: Json, expected: Any) -> None:
    request = parsed(tools=[TOOL], tool_choice=choice).request
    assert (request.tool_choice, request.parallel_calls) == (expected, True)
    alone = {**choice, "disable_parallel_tool_use": True}
    assert not parsed(tools=[TOOL], tool_choice=alone).request.parallel_calls


def test_the_tools_of_messages_count_with_the_others() -> None:
    names = [f"f{i}" for i in range(limits.TOOLS)]
    defined = [{"type": "tool_definition", "definition": {**TOOL, "name": name}} for name in names]
    added = system([{"type": "tool_addition", "tool": each} for each in defined])
    assert len(conversation(messages=[HI, added]).tools) == limits.TOOLS
    assert refused(messages=[HI, added], tools=[TOOL]).param == "tools"
    functions = [{"function": {"name": name}} for name in names]
    body = {"model": "m", "messages": [{"role": "system", "tools": functions}] * 2}
    chat_completions.to_request(ChatBody.model_validate(body))
    native.to_request(NativeBody.model_validate(body), "m")
    one_more = {**body, "tools": [{"name": "f", "function": {"name": "f"}}]}
    with pytest.raises(BadRequest, match=f"the limit is {limits.TOOLS}"):
        chat_completions.to_request(ChatBody.model_validate(one_more))
    with pytest.raises(BadRequest, match=f"the limit is {limits.TOOLS}"):
        native.to_request(NativeBody.model_validate(one_more), "m")


@cases
def test_tools_that_can_not_be_offered(asked: Json, param: str) -> None:
    error = refused(**asked)
    assert error.param == param
    if param == "tools":
        assert repr(asked["tools"][-1]["type"]) in error.message


@cases
def test_a_deferred_tool_is_offered_once_it_is_named(given: list[Json], offered: list[str]) -> None:
    found = conversation(messages=given, tools=[LATER, TOOL, LAST])
    assert [tool.name for tool in found.tools] == offered
    chosen = {"type": "tool", "name": "later"}
    forced = conversation(messages=given, tools=[LATER, TOOL, LAST], tool_choice=chosen).tools
    assert "later" in [tool.name for tool in forced]


BEGUN: list[Event] = [Started("m", 50)]
DONE = Finished(0, "stop", TokenCounts(9, cached_tokens=20, reasoning_tokens=4))
CALLED = Finished(0, "tool_calls", TokenCounts(9, cached_tokens=20))


def call(number: int, id: str, *arguments: str, whole: bool = True) -> list[Event]:
    deltas = [ToolCallDelta(0, number, piece) for piece in arguments]
    end = [ToolCallFinished(0, number)] if whole else []
    return [ToolCallStarted(0, number, id, "f"), *deltas, *end]


def output(**options: Any) -> MessagesOutput:
    return MessagesOutput(model="m", signer=SIGNER, options=OutputOptions(**options))


def chunks(events: Sequence[Event], **options: Any) -> list[Json]:
    found = chunks_of(output(**options), events)
    for chunk in found:
        assert_event(chunk)
    return found


def message(events: Sequence[Event], **options: Any) -> Json:
    """As it is sent whole, which is what a client makes of the stream."""
    found = body_of(output(**options), events)
    assert_message(found)
    assert nameless(gathered(chunks(events, **options))) == nameless(found)
    return found


def content(*events: Event, **options: Any) -> list[Json]:
    found: list[Json] = message([*BEGUN, *events], **options)["content"]
    return found


def test_thought_text_and_calls() -> None:
    assert content(
        ReasoningDelta(0, "H"),
        ReasoningDelta(0, "m."),
        TextDelta(0, "I "),
        TextDelta(0, "look."),
        *call(0, "call_1", '{"a"', ": 1}"),
        *call(1, "call_2", "{}"),
        CALLED,
    ) == [
        {"type": "thinking", "thinking": "Hm.", "signature": SIGNER.sign("Hm.")},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "f", "input": {}},
    ]


def test_a_text_of_another_phase_is_another_block() -> None:
    events = [
        TextDelta(0, "I ", phase="commentary"),
        TextDelta(0, "look."),
        TextDelta(0, "It ", phase="final_answer"),
        TextDelta(0, "rains."),
    ]
    texts = [block["text"] for block in content(*events, DONE)]
    assert texts == ["I look.", "It rains."]


def test_an_omitted_thought_comes_in_its_signature() -> None:
    (thought, text) = content(
        ReasoningDelta(0, "Hm."), TextDelta(0, "a"), DONE, omits_thoughts=True
    )
    assert thought["thinking"] == ""
    assert SIGNER.opened(thought["signature"]) == "Hm."
    assert text["text"] == "a"


@pytest.mark.parametrize("id", ["functions.f:0", "a b", "", "é"])
def test_an_id_that_clients_would_refuse_is_replaced(id: str) -> None:
    events = [*BEGUN, *call(0, id, "{}"), CALLED]
    (block,) = body_of(output(), events)["content"]
    assert block["id"].startswith("toolu_")


def test_a_call_that_was_cut_off_is_not_in_the_whole_message() -> None:
    """And its stream ends with the reason for it."""
    cut = Finished(0, "length", TokenCounts(9))
    events = [*BEGUN, *call(0, "1", "{}"), *call(1, "2", '{"a', whole=False), cut]
    found = body_of(output(), events)
    assert [block["id"] for block in found["content"]] == ["1"]
    assert found["stop_reason"] == "max_tokens"
    kinds = [chunk["type"] for chunk in chunks(events)]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_text_after_a_call_that_was_given_up() -> None:
    events = [*BEGUN, *call(0, "1", '{"a', whole=False), TextDelta(0, "So."), DONE]
    found = body_of(output(), events)
    assert found["content"] == [{"type": "text", "text": "So."}]
    assert found["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (DONE, "end_turn", None),
        (CALLED, "tool_use", None),
        (Finished(0, "length", TokenCounts(9)), "max_tokens", None),
        (Finished(0, "stop", TokenCounts(9), stop_string="x"), "stop_sequence", "x"),
    ],
)
def test_why_it_ended(finished: Finished, reason: str, sequence: str | None) -> None:
    found = message([*BEGUN, TextDelta(0, "a"), finished])
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


# The prompt


def usage(**options: Any) -> Json:
    found: Json = message([*BEGUN, TextDelta(0, "a"), DONE], **options)["usage"]
    assert found["output_tokens_details"] == {"thinking_tokens": 4}
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(found[part] for part in parts) == 50
    return found


@cases
def test_the_parts_of_the_prompt(options: Json, stored: int) -> None:
    found = usage(**options)
    assert found["cache_read_input_tokens"] == 20
    assert found["cache_creation_input_tokens"] == stored


def test_pings_while_the_prompt_is_computed() -> None:
    progress = [PromptProgress(0, 50, 20, done) for done in (30, 50)]
    first, *pings = chunks([*BEGUN, *progress])
    assert first["message"]["usage"]["cache_read_input_tokens"] == 20
    assert pings == [{"type": "ping"}, {"type": "ping"}]


def test_the_first_event_waits_until_the_cached_tokens_are_known() -> None:
    assert chunks(BEGUN) == []
    first, *_ = chunks([*BEGUN, DONE])
    assert first["message"]["usage"]["cache_read_input_tokens"] == 20


def test_what_was_mended_is_told() -> None:
    repaired = Repaired(0, "json", "tool_calls[0].function.arguments")
    found = message([*BEGUN, *call(0, "1", "{}"), repaired, CALLED])
    assert found["mlx_server"]["repairs"][0]["what"] == "json"
