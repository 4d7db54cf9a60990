"""Every route that takes a body, and bodies that it takes: together they use all of its fields."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_server.api import ollama
from mlx_server.api.batches import BatchBody, MessageBatchBody
from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.completions import CompletionBody
from mlx_server.api.conversations import ConversationBody, ItemsBody, UpdateBody
from mlx_server.api.embeddings import EmbeddingsBody
from mlx_server.api.fields import SamplingBody, WireModel
from mlx_server.api.fine_tuning import JobBody
from mlx_server.api.infill import FimBody, InfillBody
from mlx_server.api.messages.input import MessagesBody, PromptBody
from mlx_server.api.native import NativeBody
from mlx_server.api.page.routes import FetchBody, PageConversation
from mlx_server.api.pool import Load, LoadBody, Unload, UnloadBody
from mlx_server.api.replay import Reset
from mlx_server.api.rerank import RerankBody
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.tokenize import DetokenizeBody, TokenizeBody
from tests.api import wire
from tests.api.test_requests import BODIES

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


SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^a+$"}, "b": {"$ref": "#/$defs/b"}},
    "required": ["a"],
    "$defs": {"b": {"enum": [1, None, "x"]}},
}
FUNCTION: Json = {"name": "f", "description": "does f", "parameters": SCHEMA, "strict": False}

BEGUN: list[Json] = [HI, {"role": "assistant", "content": "It is"}]

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
MADE: tuple[Json, ...] = ({"items": CALLED, "metadata": {"a": "b"}}, {})


FUNCTIONS: list[Json] = [{"type": "function", "function": {**FUNCTION, "strict": None}}]
TOKENIZED: tuple[Json, ...] = (
    {"prompt": "hi"},
    {"model": TINY, "prompt": "hi", "add_special_tokens": False, "return_token_strs": True},
    {
        "model": SAID,
        "messages": BEGUN,
        "tools": FUNCTIONS,
        "chat_template_kwargs": {"a": 1},
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

EMBEDDED_BY_OLDER_CLIENTS = {"model": EMBEDS, "prompt": "hi", "options": {}, "keep_alive": "5m"}

FIELDS: list[Json] = [
    json.loads(line)
    for line in Path(wire.__file__).with_name("fields.jsonl").read_text("utf-8").splitlines()
]


def with_all_fields(path: str) -> tuple[Json, ...]:
    bodies = ({**BODIES[path], **row["set"]} for row in FIELDS if row["to"] == path)
    # a recording leaves grammars that it does not know of
    return tuple(
        {**body, "model": SAID if body.get("tool_choice") == "auto" else TINY} for body in bodies
    )


SEVERAL_PROMPTS: tuple[Json, ...] = (
    {"model": TINY, "prompt": [[1, 5], [6]], "max_tokens": 2, "n": 2, "best_of": 2},
    {"model": TINY, "prompt": ["a", "b"], "max_tokens": 0, "echo": True, "logprobs": 2},
    {
        "model": TINY,
        "prompt": ["a", "b"],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "skip_special_tokens": False,
        "return_progress": True,
        "timings_per_token": True,
        "store": False,
    },
)
COMPLETED = (*with_all_fields("/v1/completions"), *SEVERAL_PROMPTS)
SUFFIX: Json = {"model": SAID, "prompt": "a", "suffix": "b", "max_tokens": 2}
OF_MISTRAL: Json = {**SUFFIX, "n": 2, "best_of": 2, "random_seed": 1}
TO_BE_FILLED = (*with_all_fields("/v1/completions"), SEVERAL_PROMPTS[2] | SUFFIX, OF_MISTRAL)
INFILL: Json = {
    **{n: v for body in COMPLETED for n, v in body.items() if n in SamplingBody.model_fields},
    "model": SAID,
    "input_prefix": "a",
    "input_suffix": "b",
    "input_extra": [{"filename": "x.py", "text": "x"}],
    "prompt": "c",
    "n_predict": 2,
    "n_cmpl": 2,
    "repeat_penalty": 1.1,
    "stream": True,
}
BACKGROUND: Json = {"model": TINY, "input": "hi", "max_output_tokens": 2, "background": True}
ADAPTER: Json = {"lora_name": "a", "model": TINY}
"""There is none of this name."""
PAGE_CONVERSATION: Json = {"title": "a", "changed": 5, "text": "{}"}
LOADED: Json = {"model": SAID, "instance_id": None, "echo_load_config": True}
METADATA: Json = {"metadata": {"a": "b"}}
MESSAGES = with_all_fields("/v1/messages")
BATCH: Json = {
    "input_file_id": "file-none",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
    **METADATA,
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
}
JOB: Json = {
    "model": TINY,
    "training_file": "file-none",
    "validation_file": "file-none",
    **METADATA,
    "hyperparameters": {"n_epochs": 1, "batch_size": 1, "learning_rate_multiplier": 1.0},
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": "auto"}}},
    "suffix": "a",
    "seed": 1,
}
MESSAGE_BATCH: Json = {"requests": [{"custom_id": "a", "params": MESSAGES[0]}]}
COUNTED = tuple(
    {name: value for name, value in body.items() if name in PromptBody.model_fields}
    for body in MESSAGES
)

ROUTES = (
    Route("/v1/chat/completions", ChatBody, with_all_fields("/v1/chat/completions")),
    Route("/v1/chat/completions/{id}", UpdateBody, (METADATA,), 404),  # the id of another thing
    Route("/v1/completions", CompletionBody, (*COMPLETED, SUFFIX)),
    Route("/v1/fim/completions", FimBody, TO_BE_FILLED),
    Route("/infill", InfillBody, (INFILL,)),
    Route("/v1/embeddings", EmbeddingsBody, EMBEDDED),
    Route("/v1/rerank", RerankBody, RANKED),
    Route("/api/embed", ollama.EmbedBody, EMBEDDED_BY_OLLAMA),
    Route("/api/embeddings", ollama.OlderEmbedBody, (EMBEDDED_BY_OLDER_CLIENTS,)),
    Route("/tokenize", TokenizeBody, TOKENIZED),
    Route("/detokenize", DetokenizeBody, ({"model": TINY, "tokens": [5, 6]},)),
    Route("/generate", NativeBody, with_all_fields("/generate")),
    Route("/v1/responses", ResponsesBody, (*with_all_fields("/v1/responses"), BACKGROUND)),
    Route("/v1/responses/input_tokens", ResponsesBody, with_all_fields("/v1/responses")),
    Route(
        "/v1/responses/compact",
        ResponsesBody,
        # two tokens make no summary
        tuple({**body, "max_output_tokens": 40} for body in with_all_fields("/v1/responses")),
    ),
    Route("/v1/responses/{id}/cancel", WireModel, ({},)),
    Route("/v1/messages", MessagesBody, MESSAGES),
    Route("/v1/messages/count_tokens", PromptBody, COUNTED),
    Route("/v1/batches", BatchBody, (BATCH,), 404),  # there is no such file
    Route("/v1/batches/{id}/cancel", WireModel, ({},), 404),
    Route("/v1/fine_tuning/jobs", JobBody, (JOB,), 404),  # there is no such file
    Route("/v1/fine_tuning/jobs/{id}/cancel", WireModel, ({},), 404),
    Route("/v1/messages/batches", MessageBatchBody, (MESSAGE_BATCH,)),
    Route("/v1/messages/batches/{id}/cancel", WireModel, ({},), 404),
    Route("/v1/conversations", ConversationBody, MADE),
    Route("/v1/conversations/{id}", UpdateBody, (METADATA,)),
    Route("/v1/conversations/{id}/items", ItemsBody, ({"items": CALLED[:1]},)),
    Route("/v1/load_lora_adapter", Load, ({**ADAPTER, "lora_path": "adapters/a"},), 404),
    Route("/v1/unload_lora_adapter", Unload, (ADAPTER,), 404),
    Route("/v1/models/load", LoadBody, (LOADED,)),
    Route("/v1/models/unload", UnloadBody, ({"instance_id": SAID, "model": None},)),
    # the owner has not asked for them
    Route("/page/conversations/{id}", PageConversation, (PAGE_CONVERSATION,), 403),
    Route("/page/fetches", FetchBody, ({"model": SAID},), 404),
    Route("/page/fetches/cancel", FetchBody, ({"model": SAID},), 404),
    Route("/api/chat", ollama.OllamaChatBody, with_all_fields("/api/chat")),
    Route(
        "/api/generate",
        ollama.GenerateBody,
        (*with_all_fields("/api/generate"), {"model": SAID, "prompt": "a", "suffix": "b"}),
    ),
    Route("/api/show", ollama.ShowBody, ({"model": TINY}, {"name": SAID})),
    *(Route(f"/api/{name}", WireModel, ({},), 403) for name in ("pull", "push", "create", "copy")),
    Route("/v1/replay/reset", Reset, ({}, {"model": SAID})),
)
