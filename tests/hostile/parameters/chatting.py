"""Of chat completions, completions and /generate."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mlx_server.api import content, fields, formats, native
from mlx_server.api.chat_completions import input as chat
from mlx_server.api.completions import CompletionBody
from tests.hostile.parameters.case import (
    ADAPTER,
    CALLS,
    HI,
    SAID,
    THINKS,
    A,
    Case,
    Json,
    Shown,
    refused,
)

STORED = "tests/api/chat_completions/test_stored.py"
ASKED = "tests/api/test_requests.py::test_a_body_asks_for"
SPECIAL = "tests/live/test_generate_text.py::test_special_tokens_are_part_of_a_text_that_wants_them"
CONTRACT = "tests/live/test_contract_replayed.py"

DEEP: Json = {"temperature": 2, "seed": 1}
BOTH: Json = {"logit_bias": {str(A + i): 100 for i in range(5)}}
ONLY_A: Json = {"logit_bias": {str(A): 100}}
LIKELY_A: Json = {"logit_bias": {str(A): 20}}
UNIQUE: Json = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}

SAMPLING: Mapping[str, Shown] = {
    "adapter": Case({"adapter": ADAPTER}),
    "adapters": Case({"adapters": ADAPTER}),
    "adapter_path": Case({"adapter_path": ADAPTER}),
    "lora_path": Case({"lora_path": ADAPTER}),
    "adapter_id": Case({"adapter_id": ADAPTER}),
    "include_raw": "tests/live/test_asked_for.py::test_the_raw_output_of_any_family_on_request",
    "adapter_scale": Case({"adapter_scale": 0}, {"adapter": ADAPTER}),
    "stop": Case({"stop": ["aaa"]}, ONLY_A),
    "seed": Case({"seed": 2}, DEEP),
    "logit_bias": Case(ONLY_A),
    "temperature": Case({"temperature": 2}, {"seed": 1}),
    "top_p": Case({"top_p": 1e-9}, DEEP),
    "top_k": Case({"top_k": 1}, DEEP),
    "min_p": Case({"min_p": 1}, DEEP),
    "repetition_penalty": Case({"repetition_penalty": 10}, LIKELY_A),
    "presence_penalty": Case({"presence_penalty": 2}, BOTH),
    "frequency_penalty": Case({"frequency_penalty": 2}, BOTH),
}

CALL_TOKENS = 120
"""As many as a call takes."""

FUNCTION: Json = {
    "name": "f",
    "description": "does f",
    "parameters": {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]},
}

HANDED_BACK = "tests/upstream/test_reasoning_details.py"


def offered(*functions: Json, **more: Any) -> Json:
    """As chat completions have it."""
    return {"tools": [{"type": "function", "function": each} for each in functions], **more}


OFFERED = offered(FUNCTION)
ONE = offered(FUNCTION, max_tokens=CALL_TOKENS)
TWO = offered(FUNCTION, {**FUNCTION, "name": "g"}, max_tokens=CALL_TOKENS)

OLDER: Json = {"functions": [FUNCTION], "max_tokens": CALL_TOKENS}


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> Json:
    some = {"mode": mode, "tools": [named(name) for name in names]}
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": some}}


def asked(text: str, **more: Any) -> Json:
    return {
        "model": SAID,
        "max_tokens": 80,
        "messages": [{"role": "user", "content": text}],
        **more,
    }


def answered(call: Json | None = None, result: Json | None = None, **more: Any) -> Json:
    """A turn of the model in between, with what its message has besides."""
    made = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    asks = {"role": "assistant", "content": "a", "tool_calls": [{**made, **(call or {})}], **more}
    gives = {"role": "tool", "tool_call_id": "c", "content": "x", **(result or {})}
    return {"messages": [HI, asks, gives]}


def calling(id: str) -> Json:
    """And no answer is there yet."""
    made = {"id": id, "function": {"name": "f", "arguments": "{}"}}
    return {"messages": [HI, {"role": "assistant", "tool_calls": [made]}, HI]}


def user(**more: Any) -> Json:
    return {"messages": [{**HI, **more}]}


BEGUN: Json = {"messages": [HI, {"role": "assistant", "content": "It is"}]}


def schema(schema: Any, **more: Any) -> Json:
    asked = {"name": "n", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": asked}}


def structured(**asked: Any) -> Case:
    return Case({"structured_outputs": asked})


CHATTING: Mapping[type[BaseModel], Mapping[str, Shown]] = {
    fields.SamplingBody: {**SAMPLING, "store": ASKED},
    fields.GenerationBody: {
        "model": Case({"model": SAID}),
        "stream": Case({"stream": True}),
        "n": Case({"n": 2}),
        "prompt_logprobs": Case({"prompt_logprobs": 1}),
        "return_token_ids": Case({"return_token_ids": True}),
        "timings_per_token": Case({"timings_per_token": True}),
        "return_progress": Case({"return_progress": True}, {"stream": True}),
    },
    fields.UsageStreamOptions: {
        "include_usage": Case({"stream_options": {"include_usage": True}}, {"stream": True}),
        "include_obfuscation": Case(
            {"stream_options": {"include_obfuscation": True}}, {"stream": True}
        ),
        "continuous_usage_stats": Case(
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"stream": True, "stream_options": {"include_usage": True}},
        ),
        "include_progress": Case({"stream_options": {"include_progress": True}}, {"stream": True}),
    },
    formats.ConstrainedBody: {
        "guided_json": Case({"guided_json": {"const": "x"}}),
        "guided_regex": Case({"guided_regex": "xyz"}),
        "guided_choice": Case({"guided_choice": ["xyz"]}),
        "guided_grammar": Case({"guided_grammar": 'root ::= "xyz"'}),
        "json_schema": Case({"json_schema": {"const": "x"}}),
        "grammar": Case({"grammar": 'root ::= "xyz"'}),
    },
    formats.JsonObjectFormat: {
        "type": Case({"response_format": {"type": "json_object"}}),
        "schema_": Case(
            {"response_format": {"type": "json_object", "schema": {"const": "x"}}},
            {"response_format": {"type": "json_object"}},
        ),
    },
    formats.JsonSchemaParam: {
        "schema_": Case(schema({"const": "x"}), schema({"const": "y"})),
        "name": ASKED,
        "description": ASKED,
        "strict": refused(schema(UNIQUE, strict=True), **schema(UNIQUE)),
    },
    formats.StructuredOutputs: {
        "json_": structured(json={"const": "x"}),
        "regex": structured(regex="xyz"),
        "choice": structured(choice=["xyz"]),
        "grammar": structured(grammar='root ::= "xyz"'),
        "json_object": structured(json_object=True),
        "structural_tag": refused({"structured_outputs": {"structural_tag": {}, "regex": "xyz"}}),
    },
    chat.ChatBody: {
        "messages": Case(user(content="Ho")),
        "max_tokens": Case({"max_tokens": 3}),
        "max_completion_tokens": Case({"max_completion_tokens": 3}),
        "logprobs": Case({"logprobs": True}),
        "top_logprobs": Case({"top_logprobs": 2}, {"logprobs": True}),
        "tool_choice": Case({"tool_choice": "required"}, ONE),
        "parallel_tool_calls": Case({"parallel_tool_calls": False}, asked(CALLS, **OFFERED)),
        "function_call": Case({"function_call": {"name": "f"}}, OLDER),
        "modalities": refused({"modalities": ["audio"]}),
        "reasoning_effort": Case({"reasoning_effort": "low"}),
        "include_reasoning": Case({"include_reasoning": False}, asked(THINKS)),
        "echo": Case({"echo": True}, BEGUN),
        "verbosity": Case({"verbosity": "low"}),
        "metadata": f"{STORED}::test_lists_are_filtered",
        "max_response_tokens": Case({"max_response_tokens": 2}, asked(THINKS)),
    },
    chat.EffortParam: {
        "effort": Case({"reasoning": {"effort": "low"}}),
        "max_tokens": Case({"reasoning": {"max_tokens": 2}}, asked(THINKS)),
        "enabled": Case({"reasoning": {"enabled": False}}),
        "exclude": Case({"reasoning": {"exclude": True}}, asked(THINKS)),
    },
    chat.MessageParam: {
        "role": Case(user(role="system")),
        "content": Case(user(content="Ho")),
        "name": Case(user(name="me")),
        "reasoning": Case(answered(reasoning="Hm"), answered()),
        "reasoning_content": Case(answered(reasoning_content="Hm"), answered()),
        "reasoning_details": f"{HANDED_BACK}::test_details_of_the_reasoning_come_back_as_they_were",
        "refusal": Case(answered(content=None, refusal="No"), answered(content=None)),
        "tool_call_id": ASKED,
    },
    chat.OtherToolParam: {
        "type": "tests/api/test_histories.py::test_tools_of_another_provider_are_reported"
    },
    chat.FunctionCallParam: {
        "type": ASKED,
        "id": Case(calling("d"), calling("c")),
        "extra_content": f"{HANDED_BACK}::test_a_signature_comes_back_with_its_call",
    },
    chat.FreeformCallParam: {
        "id": ASKED,
        "extra_content": f"{HANDED_BACK}::test_calls_of_every_kind_keep_theirs",
    },
    chat.FreeformCall: dict.fromkeys(("name", "input"), ASKED),
    chat.FreeformParam: dict.fromkeys(("name", "description", "format"), ASKED),
    chat.GrammarParam: {"grammar": ASKED},
    chat.FunctionCall: {
        "name": Case(answered({"function": {"name": "g", "arguments": "{}"}}), answered()),
        "arguments": Case(
            answered({"function": {"name": "f", "arguments": '{"b": 1}'}}), answered()
        ),
    },
    chat.FunctionParam: {
        "name": Case(offered({**FUNCTION, "name": "g"}), OFFERED),
        "description": Case(offered({**FUNCTION, "description": "does g"}), OFFERED),
        "parameters": Case(offered({**FUNCTION, "parameters": {"type": "object"}}), OFFERED),
        "strict": refused(
            offered({"name": "f", "parameters": {"properties": {"a": UNIQUE}}, "strict": True}),
            **offered({"name": "f", "parameters": {"properties": {"a": UNIQUE}}}),
        ),
    },
    chat.FunctionName: {
        "name": Case({"tool_choice": named("g")}, {**TWO, "tool_choice": named("f")}),
    },
    chat.AllowedTools: {
        "mode": Case(allowed("required", "f"), {**TWO, **allowed("auto", "f")}),
        "tools": Case(allowed("required", "g"), {**TWO, **allowed("required", "f")}),
    },
    fields.ContinuationBody: {
        "add_generation_prompt": Case({"add_generation_prompt": False}, BEGUN),
        "continue_final_message": Case({"continue_final_message": True}, BEGUN),
    },
    fields.ThinkingBody: {
        "enable_thinking": Case({"enable_thinking": False}),
        "thinking_budget": f"{CONTRACT}::test_a_budget_of_reasoning_is_kept_to_the_token",
        "chat_template_kwargs": Case({"chat_template_kwargs": {"color": "red"}}),
    },
    fields.ThinkingParam: {
        "type": Case({"thinking": {"type": "disabled"}}),
        "budget_tokens": Case(
            {"thinking": {"type": "enabled", "budget_tokens": 2}},
            asked(THINKS, thinking={"type": "enabled"}),
        ),
    },
    content.TextPart: {
        "text": Case(
            user(content=[{"type": "text", "text": "Ho"}]),
            user(content=[{"type": "text", "text": "Hi"}]),
        ),
    },
    content.RefusalPart: {
        "refusal": Case(
            user(content=[{"type": "refusal", "refusal": "Ho"}]),
            user(content=[{"type": "refusal", "refusal": "Hi"}]),
        ),
    },
    content.FilePart: {"file": ASKED},
    content.FileData: {
        "filename": ASKED,
        "file_data": ASKED,
        "file_id": ASKED,
        "file_url": ASKED,
    },
    content.MediaPart: {"type": Case(user(content=[{"type": "image_url"}]), user(content=[]))},
    content.OtherPart: {"type": ASKED},
    CompletionBody: {
        "prompt": Case({"prompt": "Ho"}),
        "max_tokens": Case({"max_tokens": 3}),
        "logprobs": Case({"logprobs": 2}),
        "echo": Case({"echo": True}),
        "best_of": refused({"best_of": 2}),
        "skip_special_tokens": SPECIAL,
    },
    native.NativeBody: {
        "messages": Case(user(content="Ho")),
        "model": Case({"model": SAID}),
        "stream": refused({"stream": True}),
        "two_pass": Case(
            {"two_pass": False}, asked(THINKS, max_thinking_tokens=3, max_response_tokens=3)
        ),
        "think_tag": Case({"think_tag": "ponder"}),
        "max_thinking_tokens": Case({"max_thinking_tokens": 3}, asked(THINKS)),
        "max_response_tokens": Case({"max_response_tokens": 3}),
        "tool_choice": Case(
            {"tool_choice": "required"}, {"tools": [FUNCTION], "max_response_tokens": CALL_TOKENS}
        ),
        "tool_parser": Case({"tool_parser": "mine"}),
    },
    native.NativeTool: {
        "name": Case({"tools": [{**FUNCTION, "name": "g"}]}, {"tools": [FUNCTION]}),
        "description": Case({"tools": [{**FUNCTION, "description": "g"}]}, {"tools": [FUNCTION]}),
        "parameters": Case(
            {"tools": [{**FUNCTION, "parameters": {"type": "object"}}]}, {"tools": [FUNCTION]}
        ),
    },
}
