"""Converts a messages body to a `GenerateRequest`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlx_server.api import formats
from mlx_server.api.compaction_prompt import SUMMARIZE
from mlx_server.api.formats import FormatChoice, the_only_format
from mlx_server.api.messages.effort import effort_of, only_has_results
from mlx_server.api.messages.protocol import (
    AnthropicThinking,
    CompactionConfig,
    MessagesBody,
    OutputFormat,
    PromptBody,
)
from mlx_server.api.messages.tools import select_tools
from mlx_server.api.messages.turns import instructions, turns_of
from mlx_server.api.signatures import Signer
from mlx_server.api.thinking import SOME_EFFORT
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message
from mlx_server.requests import GenerateRequest, JsonFormat


@dataclass(frozen=True, slots=True)
class ParsedMessagesRequest:
    request: GenerateRequest
    ignored: tuple[str, ...]
    stores_prompt: bool
    """Whether the client asks with `cache_control` to keep the prompt for later requests."""


def to_request(body: PromptBody, signer: Signer) -> ParsedMessagesRequest:
    turns = turns_of(body.messages, signer)
    tools, tool_choice = select_tools(body, turns.tools)
    constrained = the_only_format(list(_formats(body)), otherwise="output_config.format")
    system = instructions(body.system)
    messages = (*([Message("system", system)] if system else ()), *turns.messages)
    conversation = Conversation(
        messages=messages,
        tools=tools,
        template_kwargs=_template_kwargs(body),
        response_format=formats.prompt_description(constrained["format"]),
        continue_final_message=_is_begun(messages[-1]),
    )
    if isinstance(body, MessagesBody) and body.compaction:
        conversation, tool_choice = _summarizing(conversation, body.compaction), "auto"
        constrained = the_only_format([], otherwise="output_config.format")
    choice = body.tool_choice
    is_streamed = isinstance(body, MessagesBody) and bool(body.stream)
    request = GenerateRequest(
        model=body.model,
        **body.shared_fields(),
        **constrained,
        buffered=not is_streamed,
        progress=is_streamed,
        prompts=(conversation,),
        max_tokens=max(1, body.max_tokens) if isinstance(body, MessagesBody) else None,
        may_end_early=True,
        tool_choice=tool_choice,
        thinking_budget=body.thinking.budget_tokens if body.thinking else None,
        param_names=_param_names(body),
        implied=frozenset() if _effort(body) else frozenset({"reasoning_effort"}),
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
    )
    ignored = (*body.ignored(), *turns.ignored, *_unused(body))
    return ParsedMessagesRequest(request, ignored, stores_prompt=has_cache_control(body))


def _summarizing(conversation: Conversation, config: CompactionConfig) -> Conversation:
    """The request for a summary, which is text without calls and without a format."""
    ask = (config.instructions or "").strip() or SUMMARIZE
    messages = (*conversation.messages, Message("user", ask))
    return Conversation(messages, template_kwargs=conversation.template_kwargs)


def _is_begun(last: Message) -> bool:
    """Whether the client has begun the answer, which then goes on with its last message."""
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def has_cache_control(body: PromptBody) -> bool:
    """Whether there is a `cache_control` anywhere. Where it is makes no difference here: the prompt
    cache keeps every prompt, and finds the longest beginning that two have in common."""
    system = body.system if isinstance(body.system, list) else []
    contents = [message.content for message in body.messages]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    marked = (each.model_extra or {} for each in (*system, *blocks, *(body.tools or ())))
    return body.cache_control is not None or any(each.get("cache_control") for each in marked)


def _effort(body: PromptBody) -> str | None:
    config = body.output_config
    return effort_of(body.messages) or (config.effort if config else None)


def _thinks(body: PromptBody, thinking: AnthropicThinking) -> bool:
    if thinking.type == "between_tools":
        return body.messages[-1].speaker == "user" and only_has_results(body.messages[-1])
    return thinking.type != "disabled"


def _template_kwargs(body: PromptBody) -> dict[str, Any]:
    effort, thinking = _effort(body), body.thinking
    if thinking is None:
        return {"reasoning_effort": effort} if effort else {}
    budget = thinking.budget_tokens
    if (thinking.type == "enabled") != (budget is not None):
        raise BadRequest(
            "`thinking.budget_tokens` and `thinking.type: enabled` need each other.",
            param="thinking.budget_tokens",
        )
    if not _thinks(body, thinking):
        return {"reasoning_effort": "none"}
    chosen = {"reasoning_effort": effort or SOME_EFFORT}
    return chosen if budget is None else {**chosen, "thinking_budget": budget}


def _param_names(body: PromptBody) -> dict[str, str]:
    effort = "output_config.effort" if _effort(body) else "thinking.type"
    names = {"reasoning_effort": effort, "thinking_budget": "thinking.budget_tokens"}
    return {f"chat_template_kwargs.{variable}": name for variable, name in names.items()}


def _unused(body: PromptBody) -> Iterator[str]:
    if body.thinking and not _thinks(body, body.thinking) and _effort(body):
        yield "output_config.effort"


def _formats(body: PromptBody) -> Iterator[FormatChoice]:
    """The schema is held, as Anthropic promises: one that can't be held whole is refused."""
    config = body.output_config
    named: dict[str, OutputFormat | None] = {
        "output_config.format": config.format if config else None,
        "output_format": body.output_format,
    }
    for name, found in named.items():
        if found:
            json = JsonFormat(found.schema_, strict=True)
            yield {"format": json, "format_param": f"{name}.schema"}
