"""Of responses, conversations and the adapters that clients load."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mlx_server.api import conversations, fields, freeform, pool, replay
from mlx_server.api.responses import items, tools
from mlx_server.api.responses import protocol as responses
from tests.hostile.parameters.case import (
    CALLS,
    SAID,
    THINKS,
    Case,
    Json,
    Shown,
    refused,
    whole,
)
from tests.hostile.parameters.chatting import CALL_TOKENS, FUNCTION, UNIQUE

HISTORIES = "tests/api/test_requests.py::test_a_body_asks_for"
OFFERED: Json = {"tools": [{"type": "function", **FUNCTION}]}
TWO: Json = {
    "tools": [*OFFERED["tools"], {"type": "function", **FUNCTION, "name": "g"}],
    "max_output_tokens": CALL_TOKENS,
}
USER: Json = {"role": "user", "content": "Hi"}
ASSISTANT: Json = {"role": "assistant", "content": "Yes?"}
LONG: Json = {"role": "user", "content": "x" * 1200}
INPUT = "tests/api/responses/test_input.py"
TOOLS, ITEMS = "tests/api/responses/test_tools.py", "tests/api/responses/test_item_messages.py"
TURN, SERVER_TOOLS = "tests/generation/test_tool_loop.py", "tests/generation/test_tool_loop.py"
CLIENT_TOOLS = "tests/api/responses/test_client_tools.py"
FOUND_TOOLS = f"{CLIENT_TOOLS}::test_a_deferred_tool_is_offered_once_it_is_found"
REGEX: Json = {"type": "grammar", "syntax": "regex", "definition": "a+"}
LIVE, ADAPTERS = "tests/live/test_responses.py", "tests/live/test_adapters.py"
APPROVALS = f"{INPUT}::test_answers_to_requests_are_handed_on"
SOME_TOOLS = f"{TOOLS}::test_allowed_tools_of_a_server"
CHOSEN = f"{TOOLS}::test_choice_of_a_servers_tool"
BACK = "tests/upstream/test_reasoning_details.py"
SIGNED = f"{BACK}::test_a_signature_comes_back_with_its_call"
SIGNED_KINDS = f"{BACK}::test_calls_of_every_kind_keep_theirs"
SERVERS = "tests/hostile/test_parameters.py::test_a_server_is_what_was_asked_for"
CONVERSATION = "tests/api/conversations/test_conversations.py"


def tool(**more: Any) -> Json:
    return {"tools": [{"type": "function", **FUNCTION, **more}]}


def custom(**more: Any) -> Json:
    return {"tools": [{"type": "custom", "name": "f", **more}]}


def namespace(**more: Any) -> Json:
    return {"tools": [{"type": "namespace", "name": "n", **OFFERED, **more}]}


def search(**more: Any) -> Json:
    return {"tools": [{"type": "tool_search", "execution": "client", **more}]}


def allowed(mode: str, *names: str) -> Json:
    some = [{"type": "function", "name": name} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": some}}


def asked(text: str, **more: Any) -> Json:
    return {"model": SAID, "input": text, "max_output_tokens": 80, **more}


def given(*items: Json) -> Json:
    return {"input": [USER, *items]}


class Item:
    """One that follows a user's, and what a change of it changes."""

    def __init__(self, base: Json, *before: Json, behind: tuple[Json, ...] = ()) -> None:
        self.base, self.before, self.behind = base, before, behind

    def with_(self, **more: Any) -> Case:
        return Case(self._asked({**self.base, **more}), self._asked(self.base))

    def refused(self, **more: Any) -> Case:
        return refused(self._asked({**self.base, **more}), **self._asked(self.base))

    def _asked(self, item: Json) -> Json:
        return given(*self.before, item, *self.behind)


SCHEMA: Json = {"type": "json_schema", "name": "n"}


def schema(schema: Any, **more: Any) -> Json:
    return {"text": {"format": {**SCHEMA, "schema": schema, **more}}}


CALL: Json = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT: Json = {"type": "function_call_output", "call_id": "c", "output": "x"}
TEXT: Json = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}
TEXTS: Json = {"type": "custom_tool_call_output", "call_id": "c", "output": "x"}
RAN: Json = {"type": "mcp_call", "server_label": "s", "name": "f", "arguments": "{}"}

MESSAGE = Item(USER)
REASONING = Item({"type": "reasoning"}, behind=(CALL, RESULT))
CALLING = Item(CALL, behind=(RESULT,))
CUSTOM = Item(TEXT, behind=(TEXTS,))
OUTPUT = Item(RESULT, CALL)
SERVED = Item({**RAN, "output": "y"})

RESPONDING: Mapping[type[BaseModel], Mapping[str, Shown]] = {
    responses.ResponsesBody: {
        "model": Case({"model": SAID}),
        "input": Case({"input": "Ho"}),
        "instructions": Case({"instructions": "Be brief."}),
        "previous_response_id": f"{LIVE}::test_a_chain",
        "conversation": f"{LIVE}::test_a_conversation_grows",
        "parallel_tool_calls": Case({"parallel_tool_calls": False}, asked(CALLS, **OFFERED)),
        "tool_choice": Case({"tool_choice": "required"}, TWO),
        "max_tool_calls": f"{TURN}::test_calls_over_max_tool_calls_are_ignored",
        "max_output_tokens": Case({"max_output_tokens": 3}),
        "max_response_tokens": Case({"max_response_tokens": 2}, asked(THINKS)),
        "truncation": Case(
            {"truncation": "auto"}, given(ASSISTANT, LONG, ASSISTANT, LONG), before=400
        ),
        "include": Case({"include": ["message.output_text.logprobs"]}),
        "top_logprobs": Case({"top_logprobs": 2}),
        "stream": Case({"stream": True}),
        "background": Case({"background": True, "store": True}, {"store": True}),
        "store": f"{LIVE}::test_nothing_is_left_of_what_is_not_stored",
        "metadata": Case({"metadata": {"a": "b"}}, sees=whole),
        "enable_response_messages": refused({"enable_response_messages": True}),
        "prompt_cache_key": Case({"prompt_cache_key": "k"}, sees=whole),
        "safety_identifier": Case({"safety_identifier": "k"}, sees=whole),
        "service_tier": "tests/api/responses/test_responses_wire.py::test_what_is_told_again",
        "user": Case({"user": "k"}, sees=whole),
    },
    responses.Reasoning: {
        "effort": Case({"reasoning": {"effort": "low"}}),
        "summary": Case({"reasoning": {"summary": "auto"}}, asked(THINKS)),
        "generate_summary": Case({"reasoning": {"generate_summary": "auto"}}, asked(THINKS)),
    },
    responses.Text: {"verbosity": Case({"text": {"verbosity": "low"}})},
    responses.JsonSchemaTextFormat: {
        "schema_": Case(schema({"const": "x"}), schema({"const": "y"})),
        "name": f"{INPUT}::test_formats",
        "description": f"{INPUT}::test_formats",
        "strict": refused(schema(UNIQUE, strict=True), **schema(UNIQUE)),
    },
    fields.StreamOptions: {
        "include_obfuscation": Case(
            {"stream_options": {"include_obfuscation": True}}, {"stream": True}
        ),
        "include_progress": "tests/api/test_progress.py::test_a_response_says_how_much_is_computed",
    },
    responses.ConversationParam: {"id": f"{LIVE}::test_a_conversation_grows"},
    items.Item: {"id": f"{LIVE}::test_items_are_referred_to"},
    items.MessageItem: {
        "role": MESSAGE.with_(role="system"),
        "content": MESSAGE.with_(content="Ho"),
        "phase": "tests/api/responses/test_harmony.py::test_commentary_closes_no_round",
    },
    items.ReasoningItem: {
        "content": REASONING.with_(content=[{"type": "reasoning_text", "text": "Hm"}]),
        "summary": REASONING.with_(summary=[{"type": "summary_text", "text": "Hm"}]),
        "encrypted_content": f"{ITEMS}::test_reasoning_in_each_of_its_forms",
    },
    items.FunctionCallItem: {
        "extra_content": SIGNED,
        "call_id": HISTORIES,
        "name": CALLING.with_(name="g"),
        "namespace": CALLING.with_(namespace="n"),
        "arguments": CALLING.with_(arguments='{"b": 1}'),
    },
    items.ToolSearchCallItem: dict.fromkeys(("call_id", "arguments"), FOUND_TOOLS),
    items.ToolSearchOutputItem: dict.fromkeys(("call_id", "tools"), FOUND_TOOLS),
    items.AdditionalToolsItem: {"tools": f"{CLIENT_TOOLS}::test_items_add_tools"},
    items.CustomCallItem: {
        "extra_content": SIGNED_KINDS,
        "call_id": HISTORIES,
        "name": CUSTOM.with_(name="g"),
        "namespace": CUSTOM.with_(namespace="n"),
        "input": CUSTOM.with_(input="y"),
    },
    items.CallOutputItem: {
        "call_id": HISTORIES,
        "output": OUTPUT.with_(output="y"),
    },
    items.McpListToolsItem: {
        "server_label": f"{TOOLS}::test_a_list_that_the_client_knows",
        "error": f"{TOOLS}::test_a_list_that_the_client_knows",
    },
    items.McpCallItem: {
        "extra_content": SIGNED_KINDS,
        "server_label": f"{SERVER_TOOLS}::test_earlier_calls_go_by_the_names_of_now",
        "name": SERVED.with_(name="g"),
        "arguments": SERVED.with_(arguments='{"b": 1}'),
        "output": SERVED.with_(output="z"),
        "error": Item(RAN).with_(error={"type": "mcp_tool_execution_error", "content": "no"}),
        "approval_request_id": f"{INPUT}::test_those_that_the_model_has_heard_of_are_not",
    },
    items.McpApprovalRequestItem: dict.fromkeys(
        ("id", "server_label", "name", "arguments"), APPROVALS
    )
    | {
        "extra_content": "tests/upstream/test_endpoints.py::"
        "test_it_waits_with_the_call_for_an_approval"
    },
    items.McpApprovalResponseItem: dict.fromkeys(
        ("approval_request_id", "approve", "reason"), APPROVALS
    ),
    items.ItemReference: {"id": f"{LIVE}::test_items_are_referred_to"},
    items.HostedItem: {"type": Case(given({"type": "web_search_call"}), given())},
    tools.FunctionTool: {
        "name": Case(tool(name="g"), OFFERED),
        "description": Case(tool(description="does g"), OFFERED),
        "parameters": Case(tool(parameters={"type": "object"}), OFFERED),
        "defer_loading": FOUND_TOOLS,
        "strict": refused(
            tool(parameters={"properties": {"a": UNIQUE}}, strict=True),
            **tool(parameters={"properties": {"a": UNIQUE}}),
        ),
    },
    tools.FreeformTool: {
        "name": Case(custom(name="g"), custom()),
        "description": Case(custom(description="does g"), custom()),
        "format": Case(custom(format=REGEX), custom()),
        "defer_loading": FOUND_TOOLS,
    },
    freeform.TextGrammar: {
        "definition": Case(custom(format={**REGEX, "definition": "b"}), custom(format=REGEX)),
        "syntax": Case(custom(format={**REGEX, "syntax": "lark"}), status=400),
    },
    tools.ToolNamespace: {
        "name": Case(namespace(name="m"), namespace()),
        "description": Case(namespace(description="More."), namespace()),
        "tools": Case(namespace(tools=custom()["tools"]), namespace()),
    },
    tools.ToolSearchTool: {
        "execution": f"{CLIENT_TOOLS}::test_where_nobody_can_search_every_tool_is_offered",
        "description": Case(search(description="More."), search()),
        "parameters": Case(search(parameters={"type": "object"}), search()),
    },
    tools.OtherTool: {
        "type": Case({"tools": [*OFFERED["tools"], {"type": "web_search"}]}, OFFERED)
    },
    tools.McpTool: {
        **dict.fromkeys(
            (
                *("server_label", "server_url", "connector_id", "headers", "authorization"),
                "server_description",
            ),
            SERVERS,
        ),
        "allowed_tools": SOME_TOOLS,
        "require_approval": f"{TOOLS}::test_approval",
    },
    tools.ToolFilterParam: dict.fromkeys(("tool_names", "read_only"), SOME_TOOLS),
    tools.ToolChoiceFunction: {
        "name": Case(
            {"tool_choice": {"type": "function", "name": "g"}},
            {**TWO, "tool_choice": {"type": "function", "name": "f"}},
        ),
        "namespace": f"{CLIENT_TOOLS}::test_a_choice_may_name_the_namespace",
    },
    tools.ToolChoiceMcp: dict.fromkeys(("server_label", "name"), CHOSEN),
    tools.ToolChoiceAllowed: {
        "mode": Case(allowed("required", "f"), {**TWO, **allowed("auto", "f")}),
        "tools": Case(allowed("required", "g"), {**TWO, **allowed("required", "f")}),
    },
    conversations.ConversationBody: {
        "items": f"{CONVERSATION}::test_items_come_in_pages",
        "metadata": f"{CONVERSATION}::test_one_is_made_found_changed_and_deleted",
    },
    conversations.UpdateBody: {
        "metadata": f"{CONVERSATION}::test_one_is_made_found_changed_and_deleted",
    },
    conversations.ItemsBody: {"items": f"{CONVERSATION}::test_items_are_added_found_and_deleted"},
    pool.Unload: {
        "lora_name": f"{ADAPTERS}::test_load_and_unload_while_it_runs",
        "model": f"{ADAPTERS}::test_load_and_unload_while_it_runs",
    },
    replay.Reset: {"model": "tests/live/test_recordings.py::test_entries_in_turn_are_reset"},
    pool.Load: {"lora_path": f"{ADAPTERS}::test_load_and_unload_while_it_runs"},
}
