"""Converts LangChain's messages to those of chat completions and back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.content import ContentBlock, ReasoningContentBlock, TextContentBlock
from langchain_core.messages.content import ToolCallChunk as BlockOfCallChunk
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call

from mlx_server.upstream.contents import reasoning_of

Wire = dict[str, Any]

THINKING, REASONING = "thinking", "reasoning_content"
"""Keys of `additional_kwargs` that hold thoughts: this package's own, and the one from which
LangChain makes content blocks of the type `reasoning`."""

PROVIDER = "mlx-server"

REPORTED = ("id", "created", "system_fingerprint", "service_tier", "mlx_server")
"""Members of a response body that are copied to `response_metadata`."""


def to_wire(messages: Sequence[BaseMessage], *, sends_thoughts: bool) -> list[Wire]:
    """sends_thoughts: whether earlier thoughts are sent; gpt-oss needs them between a call and its
    result."""
    return [_wire(message, sends_thoughts=sends_thoughts) for message in messages]


def _wire(message: BaseMessage, *, sends_thoughts: bool) -> Wire:
    if not isinstance(message, AIMessage):
        return convert_to_openai_messages(message)
    # convert_to_openai_messages would send an answer's reasoning blocks as content too
    bare = AIMessage(
        str(message.text),
        name=message.name,
        tool_calls=message.tool_calls,
        invalid_tool_calls=message.invalid_tool_calls,
    )
    wire: Wire = convert_to_openai_messages(bare)
    if sends_thoughts and (thoughts := thoughts_of(message)):
        wire[REASONING] = thoughts
    return wire


def thoughts_of(message: AIMessage) -> str:
    """The message's thoughts, which are in `additional_kwargs` or in its content blocks."""
    found = message.additional_kwargs.get(THINKING) or message.additional_kwargs.get(REASONING)
    if isinstance(found, str):
        return found
    blocks = message.content_blocks
    return "".join(block.get("reasoning", "") for block in blocks if block["type"] == "reasoning")


def to_message(body: Mapping[str, Any], choice: Mapping[str, Any]) -> AIMessage:
    wire: Mapping[str, Any] = choice.get("message") or {}
    calls: list[ToolCall] = []
    broken: list[InvalidToolCall] = []
    for raw in wire.get("tool_calls") or ():
        try:
            if call := parse_tool_call(raw, return_id=True):
                calls.append(ToolCall(name=call["name"], args=call["args"], id=call["id"]))
        except ValueError as error:
            broken.append(make_invalid_tool_call(raw, str(error)))
    return AIMessage(
        wire.get("content") or "",
        additional_kwargs=_thinking(wire),
        tool_calls=calls,
        invalid_tool_calls=broken,
        usage_metadata=_usage(body),
        response_metadata=_metadata(body, choice),
        id=body.get("id"),
    )


def to_chunk(body: Mapping[str, Any]) -> AIMessageChunk | None:
    """None for a chunk without choices or usage, for example one with the prompt's progress."""
    choice = next(iter(body.get("choices") or ()), None)
    usage = _usage(body)
    if choice is None:
        last = AIMessageChunk(content="", usage_metadata=usage, id=body.get("id"))
        return last if usage else None
    delta: Mapping[str, Any] = choice.get("delta") or {}
    is_last = bool(choice.get("finish_reason"))
    return AIMessageChunk(
        content=delta.get("content") or "",
        additional_kwargs=_thinking(delta),
        tool_call_chunks=list(_call_chunks(delta)),
        usage_metadata=usage,
        response_metadata=_metadata(body, choice) if is_last else {"model_provider": PROVIDER},
        id=body.get("id"),
    )


def _blocks(message: AIMessage) -> list[ContentBlock]:
    """Makes LangChain fall back to its own blocks, which are right for a complete message."""
    raise NotImplementedError


def _chunk_blocks(message: AIMessageChunk) -> list[ContentBlock]:
    """Content blocks with a separate `index` for thoughts, text and each call. Without it LangChain
    would merge blocks of different kinds when it adds up chunks."""
    if message.chunk_position == "last" and message.tool_calls:  # the chunks are added up already
        raise NotImplementedError
    blocks: list[ContentBlock] = []
    if thoughts := message.additional_kwargs.get(THINKING):
        blocks.append(ReasoningContentBlock(type="reasoning", reasoning=thoughts, index="lc_rs_0"))
    if message.text:
        blocks.append(TextContentBlock(type="text", text=str(message.text), index="lc_txt_0"))
    for chunk in message.tool_call_chunks:
        call = BlockOfCallChunk(
            type="tool_call_chunk", id=chunk["id"], name=chunk["name"], args=chunk["args"]
        )
        blocks.append({**call, "index": f"lc_tc_{chunk['index']}"})
    return blocks


register_translator(PROVIDER, _blocks, _chunk_blocks)


def _call_chunks(delta: Mapping[str, Any]) -> Iterator[ToolCallChunk]:
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        yield tool_call_chunk(
            name=function.get("name"),
            args=function.get("arguments"),
            id=call.get("id"),
            index=call.get("index"),
        )


def _thinking(wire: Mapping[str, Any]) -> Wire:
    thoughts = reasoning_of(wire)
    return {THINKING: thoughts, REASONING: thoughts} if thoughts else {}


def _metadata(body: Mapping[str, Any], choice: Mapping[str, Any]) -> Wire:
    found: Wire = {"model_provider": PROVIDER, "model_name": body.get("model")}
    found |= {name: body[name] for name in REPORTED if body.get(name) is not None}
    found["finish_reason"] = choice.get("finish_reason")
    if choice.get("logprobs"):
        found["logprobs"] = choice["logprobs"]
    return found


def _usage(body: Mapping[str, Any]) -> UsageMetadata | None:
    if not (usage := body.get("usage")):
        return None
    prompt, answer = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=answer,
        total_tokens=usage.get("total_tokens") or prompt + answer,
        input_token_details=InputTokenDetails(cache_read=cached),
        output_token_details=OutputTokenDetails(reasoning=thought),
    )
