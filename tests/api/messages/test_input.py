"""What a body becomes: the conversation that families render, and how it is answered."""

import base64
from typing import Any

import pytest

from mlx_server.api.compaction_prompt import SUMMARIZE
from mlx_server.api.messages.input import ParsedMessagesRequest, to_request
from mlx_server.api.messages.protocol import MessagesBody, PromptBody
from mlx_server.api.signatures import Signer
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import JsonFormat, NamedTool
from tests.api.wire import Json
from tests.pdf.files import pdf

SIGNER = Signer(b"key")
HI: Json = {"role": "user", "content": "hi"}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Json = {"name": "f", "description": "does f", "input_schema": SCHEMA}
CACHED: Json = {"cache_control": {"type": "ephemeral"}}


def parsed(**asked: Any) -> ParsedMessagesRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [HI], **asked}
    return to_request(MessagesBody.model_validate(body), SIGNER)


def conversation(**asked: Any) -> Conversation:
    (found,) = parsed(**asked).request.prompts
    assert isinstance(found, Conversation)
    return found


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


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def use(id: str, **input: Any) -> Json:
    return {"type": "tool_use", "id": id, "name": "f", "input": input}


def result(id: str, content: Any = "done", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def thinking(words: str, signature: str | None = None) -> Json:
    signed = SIGNER.sign(words) if signature is None else signature
    return {"type": "thinking", "thinking": words, "signature": signed}


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


# Turns


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": "a\nb"}],
        [user(text("a", **CACHED), text("b"))],
        [user(text("a")), user(text("b"))],
        [{"role": "user", "content": "a"}, user(text("b"))],
    ],
)
def test_blocks_and_messages_of_one_role_are_one_turn(given: list[Json]) -> None:
    assert messages(*given) == (Message("user", "a\nb"),)


def test_calls_and_results() -> None:
    assert messages(
        HI,
        assistant(thinking("Hm."), text("I look."), use("1", a=1), use("2", b="ü")),
        user(result("1"), result("2", [text("x"), text("y")])),
    ) == (
        Message("user", "hi"),
        Message(
            "assistant",
            "I look.",
            reasoning="Hm.",
            tool_calls=(ToolCall("1", "f", '{"a": 1}'), ToolCall("2", "f", '{"b": "ü"}')),
        ),
        Message("tool", "done", tool_call_id="1"),
        Message("tool", "x\ny", tool_call_id="2"),
    )


def test_results_have_the_order_of_their_calls_and_come_before_text() -> None:
    """Many templates have no place for ids, and Claude Code sorts the results by their time."""
    found = messages(
        assistant(use("1"), use("2")),
        user(text("Go on."), result("2"), result("1")),
    )
    assert [(each.role, each.tool_call_id) for each in found[1:]] == [
        ("tool", "1"),
        ("tool", "2"),
        ("user", None),
    ]


@pytest.mark.parametrize(
    ("more", "content"),
    [
        ({}, "no such file"),
        ({"is_error": False}, "no such file"),
        ({"is_error": True}, "Error: no such file"),
    ],
)
def test_a_result_that_is_an_error(more: Json, content: str) -> None:
    found = messages(assistant(use("1")), user(result("1", "no such file", **more)))
    assert found[1].content == content


@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_result(content: Any) -> None:
    assert messages(assistant(use("1")), user(result("1", content)))[1].content == ""


def test_a_call_without_a_result() -> None:
    """As after an abort."""
    found = messages(HI, assistant(use("1")), user(text("Stop.")))
    assert found[1:] == (
        Message("assistant", tool_calls=(ToolCall("1", "f", "{}"),)),
        Message("user", "Stop."),
    )


def test_a_result_without_a_call_is_refused() -> None:
    found = refused(messages=[HI, assistant(use("1")), user(text("a"), result("2"))])
    assert found.param == "messages[2].content[1].tool_use_id"
    assert "'2'" in found.message


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (assistant(result("1")), "user"),
        (user(use("1")), "assistant"),
        (user(thinking("Hm.")), "assistant"),
        ({"role": "system", "content": [use("1")]}, "assistant"),
    ],
)
def test_a_block_in_a_message_of_another_role(message: Json, role: str) -> None:
    found = refused(messages=[assistant(use("1")), message])
    assert found.param == "messages[1].content[0]"
    assert f"belongs in one of the role `{role}`" in found.message


def test_thoughts_between_texts() -> None:
    given = assistant(thinking("A"), text("a"), thinking("B"), thinking("C"), text("b"))
    assert messages(HI, given)[1:] == (
        Message("assistant", "a", reasoning="A"),
        Message("assistant", "b", reasoning="B\n\nC"),
    )
    called = assistant(thinking("A"), text("a"), use("1"), thinking("B"), text("b"))
    (_, found) = messages(HI, called)
    assert (found.content, found.reasoning) == ("a\n\nb", "A\n\nB")


# What stands for text


def test_documents_and_search_results_are_read_as_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {"type": "document", "source": plain, "title": "Weather", "context": "Today"}
    parts = {"type": "content", "content": [text("One."), text("Two.")]}
    found = {
        "type": "search_result",
        "title": "T",
        "source": "S",
        "content": [text("a"), text("b")],
    }
    (message,) = messages(user(document, {"type": "document", "source": parts}, found))
    assert message.content == "Weather\nToday\nIt rains.\nOne.\nTwo.\nT\nS\na\nb"
    answer = messages(assistant(use("1")), user(result("1", [document])))[1]
    assert answer.content == "Weather\nToday\nIt rains."


def test_the_media_type_of_text_is_not_reported_as_ignored() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {"type": "document", "source": source}
    body = {"model": "m", "max_tokens": 9, "messages": [user(document)]}
    assert MessagesBody.model_validate(body).ignored() == []


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [("application/pdf", pdf("It rains."), "It rains."), ("text/plain", b"It snows.", "It snows.")],
)
def test_documents_in_base64_are_read(kind: str, data: bytes, said: str) -> None:
    source = {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
    (found,) = messages(user({"type": "document", "source": source, "title": "Weather"}))
    assert said in found.content
    assert "Weather" in found.content


@pytest.mark.parametrize("kind", ["image/png", "application/zip", "x,y"])
def test_documents_of_other_kinds_are_refused(kind: str) -> None:
    source = {"type": "base64", "media_type": kind, "data": "AA=="}
    found = refused(messages=[user({"type": "document", "source": source})])
    assert found.param == "messages[0].content[0].source.data"


IMAGE: Json = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
}
LINKED: Json = {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}}


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (user(text("a"), IMAGE), "messages[1].content[1].type"),
        (user(result("1", [IMAGE])), "messages[1].content[0].content[0].type"),
        (user(LINKED), "messages[1].content[0].type"),
        (
            user({"type": "document", "source": {"type": "content", "content": [IMAGE]}}),
            "messages[1].content[0].source.content[0].type",
        ),
    ],
)
def test_what_is_no_text_is_refused_by_name(message: Json, where: str) -> None:
    found = refused(messages=[assistant(use("1")), message])
    assert found.param == where
    assert "these models read only text" in found.message


def test_a_system_message_without_text_is_no_message() -> None:
    silent = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    assert messages(HI, silent) == (Message("user", "hi"),)
    assert refused(messages=[silent]).param == "messages"


def test_a_summary_takes_the_place_of_what_it_sums_up() -> None:
    found = messages(assistant({"type": "compaction", "content": "They met."}), HI)
    assert "They met." in found[0].content
    assert messages(assistant({"type": "compaction", "content": None}), HI)[0].content == ""


def test_what_anthropics_own_tools_did_is_left_out_and_listed() -> None:
    given = assistant(
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "redacted_thinking", "data": "xyz"},
        text("So."),
    )
    found = parsed(messages=[HI, given, HI])
    assert found.ignored == (
        "messages.content.server_tool_use",
        "messages.content.web_search_tool_result",
        "messages.content.redacted_thinking",
    )
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1] == Message("assistant", "So.")


# Thoughts that come back


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


# Tools


def test_tools() -> None:
    found = conversation(tools=[{**TOOL, **CACHED}, {**TOOL, "name": "g", "type": "custom"}])
    assert found.tools == (Tool("f", "does f", SCHEMA), Tool("g", "does f", SCHEMA))
    assert conversation(tools=[{**TOOL, "strict": True}]).tools[0].strict


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, NamedTool("f")),
    ],
)
def test_choices(choice: Json | None, expected: Any) -> None:
    request = parsed(tools=[TOOL], tool_choice=choice).request
    assert (request.tool_choice, request.parallel_calls) == (expected, True)
    if choice:
        alone = {**choice, "disable_parallel_tool_use": True}
        assert not parsed(tools=[TOOL], tool_choice=alone).request.parallel_calls


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}]}, "tools[0].type"),
        ({"tools": [{"type": "tool_search_tool_regex_20251119", "name": "a"}]}, "tools[0].type"),
    ],
)
def test_tools_that_can_not_be_offered(asked: Json, param: str) -> None:
    found = refused(**asked)
    assert found.param == param
    if param.endswith(".type"):
        assert repr(asked["tools"][-1]["type"]) in found.message


LATER: Json = {**TOOL, "name": "later", "defer_loading": True}
LAST: Json = {**TOOL, "name": "last", "defer_loading": True}
SEARCHED: Json = {
    "type": "tool_search_tool_result",
    "tool_use_id": "s",
    "content": {
        "type": "tool_search_tool_search_result",
        "tool_references": [{"type": "tool_reference", "tool_name": "later"}],
    },
}


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ([HI], ["f"]),
        ([assistant(use("1")), user(result("1", "later"))], ["f"]),
        (
            [
                assistant(use("1")),
                user(result("1", [{"type": "tool_reference", "tool_name": "later"}])),
            ],
            ["f", "later"],
        ),
        (
            [assistant(use("1")), user({"type": "tool_reference", "tool_name": "last"}), HI],
            ["f", "last"],
        ),
        ([assistant(SEARCHED), HI], ["f", "later"]),
        ([assistant({**use("1"), "name": "last"}), user(result("1")), HI], ["f", "last"]),
        (
            [
                assistant({**use("1"), "name": "last"}),
                user(result("1", [{"type": "tool_reference", "tool_name": "later"}])),
            ],
            ["f", "last", "later"],
        ),
    ],
)
def test_a_deferred_tool_is_offered_once_it_is_referenced(
    given: list[Json], offered: list[str]
) -> None:
    found = conversation(messages=given, tools=[LATER, TOOL, LAST])
    assert [tool.name for tool in found.tools] == offered


def test_a_deferred_tool_that_is_chosen_is_offered() -> None:
    choice = {"type": "tool", "name": "later"}
    assert conversation(tools=[LATER], tool_choice=choice).tools[0].name == "later"


def test_a_failed_search_references_nothing() -> None:
    failed = {"type": "tool_search_tool_result_error", "error_code": "unavailable"}
    given = [assistant({**SEARCHED, "content": failed}), HI]
    assert conversation(messages=given, tools=[LATER]).tools == ()


# Tools that come and go


def added(name: str) -> Json:
    return {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}


def removed(name: str) -> Json:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


def defined(name: str) -> Json:
    tool = {"type": "tool_definition", "definition": {**TOOL, "name": name}}
    return {"type": "tool_addition", "tool": tool}


def system(*blocks: Json) -> Json:
    return {"role": "system", "content": list(blocks)}


@pytest.mark.parametrize(
    ("blocks", "offered"),
    [
        ([added("later")], ["f", "later"]),
        ([added("last"), added("later")], ["f", "last", "later"]),
        ([added("later"), removed("later")], ["f"]),
        ([removed("f")], []),
        ([removed("f"), added("f")], ["f"]),
        ([defined("new")], ["f", "new"]),
        ([defined("new"), removed("new")], ["f"]),
        ([defined("new"), removed("new"), added("new")], ["f", "new"]),
        ([{"type": "compaction", "content": "x", "tool_changes": [added("last")]}], ["f", "last"]),
        ([removed("unknown"), added("unknown")], ["f"]),
    ],
)
def test_messages_change_the_tools(blocks: list[Json], offered: list[str]) -> None:
    found = conversation(messages=[HI, system(*blocks)], tools=[LATER, TOOL, LAST])
    assert [tool.name for tool in found.tools] == offered


def test_a_tool_that_was_withdrawn_can_not_be_chosen() -> None:
    choice = {"type": "tool", "name": "f"}
    assert (
        "not among"
        in refused(messages=[HI, system(removed("f"))], tools=[TOOL], tool_choice=choice).message
    )


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"type": "mcp_tool_reference", "server_name": "s", "name": "n"}, "`mcp_servers`"),
        ({"type": "mcp_toolset_reference", "server_name": "s"}, "`mcp_servers`"),
        ({"type": "tool_definition", "definition": {"type": "web_search_20250305"}}, "web_search"),
    ],
)
def test_tools_of_others_can_not_be_added(tool: Json, said: str) -> None:
    found = refused(messages=[HI, system({"type": "tool_addition", "tool": tool})])
    assert said in found.message
    assert (found.param or "").startswith("messages[1].content[0].tool")


# Thinking, effort and format


LOW: Json = {"role": "system", "content": [], "output_config": {"effort": "low"}}
MAX: Json = {"role": "system", "output_config": {"effort": "max"}}
RESULT = (assistant(use("1")), user(result("1")))


@pytest.mark.parametrize(
    ("given", "effort"),
    [
        ([HI], "high"),
        ([HI, LOW], "low"),
        ([LOW, HI], "low"),
        ([HI, LOW, MAX], "max"),
        ([HI, LOW, assistant(text("a")), HI], "low"),
        ([HI, LOW, assistant(text("a")), MAX, HI], "max"),
        # from the next input on, which results are not
        ([HI, *RESULT, LOW], "high"),
        ([HI, LOW, *RESULT, MAX], "low"),
        ([HI, *RESULT, LOW, assistant(text("a")), HI], "low"),
    ],
)
def test_the_effort_of_a_system_message(given: list[Json], effort: str) -> None:
    found = conversation(messages=given, output_config={"effort": "high"})
    assert found.template_kwargs == {"reasoning_effort": effort}


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "system"}, {"role": "system", "output_config": {}}]
)
def test_a_message_without_content_sets_the_effort(message: Json) -> None:
    assert refused(messages=[HI, message]).param == "messages[1].content"


@pytest.mark.parametrize(("given", "effort"), [([HI], "none"), ([HI, *RESULT], "medium")])
def test_thinking_between_tools(given: list[Json], effort: str) -> None:
    found = conversation(messages=given, thinking={"type": "between_tools"})
    assert found.template_kwargs == {"reasoning_effort": effort}


def test_a_summary_is_asked_for() -> None:
    asked = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    found = parsed(**asked, compaction={"type": "summarize", "instructions": " "}).request
    (prompt,) = found.prompts
    assert isinstance(prompt, Conversation)
    assert (prompt.tools, found.tool_choice) == ((), "auto")
    assert prompt.messages == (Message("user", "hi"), Message("user", SUMMARIZE))
    own = conversation(compaction={"type": "summarize", "instructions": "Briefly."})
    assert own.messages[-1] == Message("user", "Briefly.")
    assert (
        refused(compaction={"type": "summarize"}, context_management={"edits": []}).param
        == "compaction"
    )


@pytest.mark.parametrize(
    ("asked", "kwargs", "budget"),
    [
        ({}, {}, None),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}, None),
        ({"thinking": {"type": "adaptive"}}, {"reasoning_effort": "medium"}, None),
        (
            {"thinking": {"type": "adaptive", "display": "updates"}},
            {"reasoning_effort": "medium"},
            None,
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"reasoning_effort": "medium", "thinking_budget": 1024},
            1024,
        ),
        (
            {
                "thinking": {"type": "enabled", "budget_tokens": 7, "display": "summarized"},
                "output_config": {"effort": "low"},
            },
            {"reasoning_effort": "low", "thinking_budget": 7},
            7,
        ),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}, None),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}, None),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}},
            {"reasoning_effort": "xhigh"},
            None,
        ),
    ],
)
def test_thinking(asked: Json, kwargs: Json, budget: int | None) -> None:
    found = parsed(**asked)
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.template_kwargs == kwargs
    assert found.request.thinking_budget == budget
    has_effort = "effort" in asked.get("output_config", {})
    assert found.request.implied == (frozenset() if has_effort else {"reasoning_effort"})
    assert found.ignored == ()


def test_an_effort_without_thinking_is_listed() -> None:
    found = parsed(thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert found.ignored == ("output_config.effort",)


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "enabled"},
        {"type": "adaptive", "budget_tokens": 5},
        {"type": "disabled", "budget_tokens": 5},
    ],
)
def test_a_budget_is_of_enabled_thinking(thinking: Json) -> None:
    assert refused(thinking=thinking).param == "thinking.budget_tokens"


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


# The rest


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


# An answer that the client has begun


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
