"""Every route that takes a body, and bodies that it takes: together they use all of its fields."""

from dataclasses import dataclass
from typing import Any

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.completions import CompletionBody
from mlx_server.api.conversations import ConversationBody, ItemsBody, UpdateBody
from mlx_server.api.embeddings import EmbeddingsBody
from mlx_server.api.fields import SamplingBody, WireModel
from mlx_server.api.messages.protocol import MessagesBody, PromptBody
from mlx_server.api.native import NativeBody
from mlx_server.api.ollama import input as ollama
from mlx_server.api.pool import Load, Unload
from mlx_server.api.replay import Reset
from mlx_server.api.rerank import RerankBody
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.tokenize import DetokenizeBody, TokenizeBody

Json = dict[str, Any]

TINY, SAID, EMBEDS, RANKS = "tiny", "said", "embeds", "ranks"
"""Random weights; a replay model that thinks, calls and answers; and the weights as embedder and as
reranker."""
CONTEXT = 1600
HI: Json = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Route:
    path: str
    """`{id}` is that of a response or of a conversation."""
    wire_type: type[WireModel]
    valid: tuple[Json, ...]
    answers: int = 200
    """To them."""

    @property
    def fields(self) -> list[str]:
        unsupported = self.wire_type.UNSUPPORTED if issubclass(self.wire_type, SamplingBody) else ()
        return [*self.wire_type.model_fields, *unsupported]


SAMPLING: Json = {
    "temperature": 0.9,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": -100},
    "seed": 1,
    "stop": ["x", "yz"],
    "adapter_scale": 1.0,
    "adapter": None,
    "adapters": None,
    "adapter_path": None,
    "lora_path": None,
    "adapter_id": None,
    "include_raw": True,
}
SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^a+$"}, "b": {"$ref": "#/$defs/b"}},
    "required": ["a"],
    "$defs": {"b": {"enum": [1, None, "x"]}},
}
FUNCTION: Json = {"name": "f", "description": "does f", "parameters": SCHEMA, "strict": False}
STREAMED: Json = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_progress": True,
}
GUIDED: tuple[Json, ...] = (
    {"guided_json": SCHEMA},
    {"guided_regex": "[a-c]{1,3}"},
    {"guided_choice": ["x", "yz"]},
    {"guided_grammar": 'root ::= "x" | "y"'},
    {"json_schema": SCHEMA},
    {"grammar": 'root ::= "x" | "y"'},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json_object": True, "structural_tag": None}},
    {"structured_outputs": {"regex": "a|b"}},
)

TALK: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "x"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "refusal": "no"},
    HI,
]
OLDER_TALK: list[Json] = [
    HI,
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "function", "name": "f", "content": "x"},
    {"role": "ipython", "content": "y"},
]
BEGUN: list[Json] = [HI, {"role": "assistant", "content": "It is"}]
CHOSEN: Json = {"type": "function", "function": {"name": "f"}}
CHAT: tuple[Json, ...] = (
    {
        "model": TINY,
        "messages": TALK,
        "max_tokens": 2,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "modalities": ["text"],
        "chat_template_kwargs": {"a": 1},
        **SAMPLING,
        **STREAMED,
    },
    {
        "model": SAID,
        "messages": TALK,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_completion_tokens": 40,
        "max_response_tokens": 20,
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "reasoning_effort": "low",
        "reasoning": {"effort": "low", "enabled": True, "exclude": False},
        "include_reasoning": True,
        "verbosity": "low",
        "store": True,
        "metadata": {"a": "b"},
    },
    {
        "model": TINY,
        "messages": [HI],
        "max_tokens": 2,
        "thinking_budget": 2,
        "enable_thinking": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        },
    },
    {
        "model": TINY,
        "messages": [HI],
        "max_tokens": 2,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [CHOSEN]},
        },
    },
    {
        "model": SAID,
        "messages": OLDER_TALK,
        "max_tokens": 40,
        "functions": [FUNCTION],
        "function_call": {"name": "f"},
    },
    {
        "model": TINY,
        "messages": BEGUN,
        "max_tokens": 2,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
        "prompt_logprobs": 2,
        "return_token_ids": True,
        "timings_per_token": True,
    },
    *({"model": TINY, "messages": [HI], "max_tokens": 2, **guided} for guided in GUIDED),
)
COMPLETIONS: tuple[Json, ...] = (
    {"model": TINY, "prompt": "Hi", "max_tokens": 2, "echo": True, "logprobs": 2, **SAMPLING},
    {
        "model": TINY,
        "prompt": [[1, 5], [6]],
        "max_tokens": 2,
        "n": 2,
        "best_of": 2,
        "skip_special_tokens": False,
        **STREAMED,
    },
    {"model": TINY, "prompt": ["a", "b"], "max_tokens": 0, "echo": True, "store": False},
    {
        "model": TINY,
        "prompt": ["a", "b"],
        "max_tokens": 2,
        "prompt_logprobs": 2,
        "return_token_ids": True,
        "timings_per_token": True,
    },
    {"model": TINY, "prompt": [5, 6], "max_tokens": 2, "response_format": {"type": "json_object"}},
    *({"model": TINY, "prompt": "Hi", "max_tokens": 2, **guided} for guided in GUIDED),
)
NATIVE: tuple[Json, ...] = (
    {
        "model": SAID,
        "messages": TALK,
        "two_pass": True,
        "think_tag": "think",
        "max_thinking_tokens": 5,
        "max_response_tokens": 20,
        "tools": [{"name": "f", "description": "does f", "parameters": SCHEMA}],
        "tool_choice": "auto",
        "tool_parser": "hermes",
        "stream": False,
    },
    {
        "messages": [HI],
        "two_pass": False,
        "max_response_tokens": 2,
        "response_format": {"type": "json_object"},
        "store": False,
        **SAMPLING,
    },
    {
        "messages": BEGUN,
        "max_response_tokens": 2,
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
)

CALLED: list[Json] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "message", "role": "assistant", "content": "x", "phase": "commentary"},
    {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
    {"type": "mcp_list_tools", "server_label": "s", "tools": []},
    {"type": "mcp_call", "server_label": "s", "name": "f", "arguments": "{}", "output": "x"},
    {"type": "web_search_call", "id": "ws_1"},
]
FORMAT: Json = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
RESPONSES: tuple[Json, ...] = (
    {
        "model": TINY,
        "input": CALLED,
        "instructions": "Be brief.",
        "max_output_tokens": 2,
        "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
        "tool_choice": "none",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "store": True,
        "background": False,
        "previous_response_id": None,
        "conversation": None,
        "truncation": "auto",
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        **SAMPLING,
    },
    {
        "model": SAID,
        "input": "hi",
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "reasoning": {"effort": "low", "summary": "auto"},
        "thinking_budget": 5,
        "max_response_tokens": 20,
        "tools": [{"type": "function", **FUNCTION}],
        "parallel_tool_calls": False,
        "max_tool_calls": 3,
        "chat_template_kwargs": {"a": 1},
    },
    {
        "model": TINY,
        "input": "hi",
        "max_output_tokens": 2,
        "text": {"format": FORMAT},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "enable_thinking": True,
    },
    {"model": TINY, "input": "hi", "max_output_tokens": 2, "background": True},
    {
        "model": TINY,
        "input": [HI],
        "max_output_tokens": 2,
        "structured_outputs": {"choice": ["x", "yz"]},
        "store": False,
    },
)
MADE: tuple[Json, ...] = ({"items": CALLED, "metadata": {"a": "b"}}, {})

USED: Json = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
DOCUMENT: Json = {
    "type": "document",
    "title": "t",
    "context": "c",
    "source": {"type": "text", "media_type": "text/plain", "data": "x"},
}
IN_BASE64: Json = {
    "type": "document",
    "source": {"type": "base64", "media_type": "text/plain", "data": "eA=="},
}
RESULT: Json = {
    "type": "tool_result",
    "tool_use_id": "c",
    "is_error": True,
    "content": [
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_reference", "tool_name": "g"},
        {"type": "search_result", "title": "t", "source": "s", "content": []},
        DOCUMENT,
        IN_BASE64,
    ],
}
TURNS: list[Json] = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "system", "content": "More.", "clear_at": "never"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "mlx1.AAAA"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "compaction", "content": "They met."},
            {"type": "text", "text": "I look."},
            USED,
        ],
    },
    {"role": "user", "content": [RESULT, {"type": "text", "text": "and?"}]},
]
OFFERED: list[Json] = [
    {"name": "f", "description": "does f", "input_schema": SCHEMA, "strict": False},
    {"type": "custom", "name": "g", "input_schema": SCHEMA, "defer_loading": True},
]
HELD: Json = {"type": "json_schema", "schema": SCHEMA}
COUNTED: tuple[Json, ...] = (
    {
        "model": TINY,
        "messages": TURNS,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a=b;"}],
        "stop_sequences": ["x", "yz"],
        "tools": OFFERED,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "mcp_servers": [],
        "store": False,
        "cache_control": {"type": "ephemeral"},
        **SAMPLING,
    },
    {
        "model": SAID,
        "messages": TURNS[:1],
        "system": "Be brief.",
        "tools": OFFERED,
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
        "output_config": {"effort": "max"},
    },
    {"model": TINY, "messages": [HI], "output_format": HELD, "thinking": {"type": "adaptive"}},
    {"model": TINY, "messages": [HI], "output_config": {"effort": "low", "format": HELD}},
)
MESSAGES = (
    *(
        {**body, "max_tokens": 40 if body["model"] == SAID else 2, "stream": streams}
        for body in COUNTED
        for streams in (True, False)
    ),
    {
        "model": TINY,
        "messages": [HI],
        "max_tokens": 2,
    },
)

OPTIONS: Json = {
    "num_predict": 2,
    "repeat_penalty": 1.1,
    "top_k": -1,
    "num_ctx": 512,
    "stop": "x",
    "temperature": 0.9,
    "top_p": 0.9,
    "min_p": 0.01,
    "seed": 1,
}
FUNCTIONS: list[Json] = [{"type": "function", "function": {**FUNCTION, "strict": None}}]
OLLAMA_TALK: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {**HI, "images": []},
    {
        "role": "assistant",
        "thinking": "Hm.",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": "a"}}}],
    },
    {"role": "tool", "tool_name": "f", "tool_call_id": "c", "content": "x"},
]
OLLAMA: tuple[Json, ...] = (
    {
        "model": TINY,
        "options": OPTIONS,
        "keep_alive": "5m",
        "think": False,
        "format": SCHEMA,
        "logprobs": True,
        "top_logprobs": 2,
    },
    {"model": SAID, "stream": True, "think": "low", "options": {"num_predict": 40}},
    {"model": SAID, "stream": False, "format": ""},
)
OLLAMA_CHAT = tuple({**body, "messages": OLLAMA_TALK, "tools": FUNCTIONS} for body in OLLAMA)
OLLAMA_GENERATE = tuple(
    {**body, "prompt": "hi", "system": "Be brief.", "raw": False, "images": []} for body in OLLAMA
)
TOKENIZED: tuple[Json, ...] = (
    {"content": "hi", "add_special": True, "parse_special": False, "with_pieces": True},
    {"model": TINY, "prompt": "hi", "add_special_tokens": False, "return_token_strs": True},
    {
        "model": SAID,
        "messages": BEGUN,
        "tools": FUNCTIONS,
        "chat_template_kwargs": {"a": 1},
        "chat_template": None,
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
)
EMBEDDED: tuple[Json, ...] = (
    {"model": EMBEDS, "input": ["hi", "there"], "encoding_format": "float", "truncate": True},
    {"model": EMBEDS, "input": [[5, 6], [7]], "encoding_format": "base64", "dimensions": 8},
    {"model": EMBEDS, "input": [5, 6], "prompt_name": None},
)
RANKED: tuple[Json, ...] = (
    {"model": RANKS, "query": "hi", "documents": ["a", "b", ""], "top_n": 2},
    {
        "model": RANKS,
        "query": "hi",
        "documents": [{"text": "a"}, {"text": "b"}],
        "return_documents": True,
        "instruction": "Find b.",
    },
)
EMBEDDED_BY_OLLAMA: tuple[Json, ...] = (
    {
        "model": EMBEDS,
        "input": ["hi", "there"],
        "truncate": True,
        "dimensions": 8,
        "options": {"num_ctx": 512},
        "keep_alive": "5m",
    },
    {"model": EMBEDS, "input": "hi"},
)
NO_SUCH_THING = {
    **dict.fromkeys(("pull", "push", "create", "copy"), 403),
}

ROUTES = (
    Route("/v1/chat/completions", ChatBody, CHAT),
    Route(
        "/v1/chat/completions/{id}",
        UpdateBody,
        ({"metadata": {"a": "b"}},),
        answers=404,  # the id is that of another thing
    ),
    Route("/v1/chat/completions/render", ChatBody, CHAT),
    Route("/v1/completions", CompletionBody, COMPLETIONS),
    Route("/v1/embeddings", EmbeddingsBody, EMBEDDED),
    Route("/v1/rerank", RerankBody, RANKED),
    Route("/api/embed", ollama.EmbedBody, EMBEDDED_BY_OLLAMA),
    Route(
        "/api/embeddings",
        ollama.OlderEmbedBody,
        ({"model": EMBEDS, "prompt": "hi", "options": {"seed": 1}, "keep_alive": "5m"},),
    ),
    Route("/tokenize", TokenizeBody, TOKENIZED),
    Route("/detokenize", DetokenizeBody, ({"model": TINY, "tokens": [5, 6]},)),
    Route("/generate", NativeBody, NATIVE),
    Route("/v1/responses", ResponsesBody, RESPONSES),
    Route("/v1/responses/input_tokens", ResponsesBody, RESPONSES),
    Route("/v1/responses/{id}/cancel", WireModel, ({},)),
    Route("/v1/messages", MessagesBody, MESSAGES),
    Route("/v1/messages/count_tokens", PromptBody, COUNTED),
    Route("/v1/conversations", ConversationBody, MADE),
    Route("/v1/conversations/{id}", UpdateBody, ({"metadata": {"a": "b"}},)),
    Route("/v1/conversations/{id}/items", ItemsBody, ({"items": CALLED[:1]},)),
    Route(
        "/v1/load_lora_adapter",
        Load,
        ({"lora_name": "a", "lora_path": "adapters/a", "model": TINY},),
        answers=400,  # there is none
    ),
    Route("/api/chat", ollama.OllamaChatBody, OLLAMA_CHAT),
    Route("/api/generate", ollama.GenerateBody, OLLAMA_GENERATE),
    Route("/api/show", ollama.ShowBody, ({"model": TINY}, {"name": SAID})),
    *(Route(f"/api/{name}", WireModel, ({},), status) for name, status in NO_SUCH_THING.items()),
    Route("/v1/replay/reset", Reset, ({}, {"model": SAID})),
    Route("/v1/unload_lora_adapter", Unload, ({"lora_name": "a", "model": TINY},), answers=404),
)
