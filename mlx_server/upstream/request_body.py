"""Writes a request as a body of OpenAI's chat completions or completions for an upstream.

A field that the upstream lacks is refused by name, replaced by text in the prompt, or listed as
ignored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_server.errors import BadRequest
from mlx_server.messages import EXTRA_CONTENT, Conversation, has_extra_content
from mlx_server.prompts.system_text import function_json
from mlx_server.requests import (
    ChoiceFormat,
    GenerateRequest,
    GrammarFormat,
    JsonFormat,
    NamedTool,
    Prompt,
    RegexFormat,
)
from mlx_server.upstream.dialects import CHAT, COMPLETIONS
from mlx_server.upstream.limited_thoughts import CONTINUED, STOPS, LimitedThoughts, ThoughtTags
from mlx_server.upstream.messages import messages_of, shows
from mlx_server.upstream.spec import UpstreamCapabilities

ANY_OBJECT: tuple[object, ...] = ({"type": "object"}, {}, True)

NEW_SAMPLING = ("top_k", "min_p", "repetition_penalty")
PENALTIES = ("presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class UpstreamRequest:
    """The request to an upstream for one answer."""

    route: str
    body: Mapping[str, Any]
    thinking: LimitedThoughts | None = None
    """The two requests that are sent in place of `body` if the thoughts are limited."""
    client: str = ""
    hops: int = 0
    """The number of servers of this kind that have passed the request on."""


def check(
    id: str, can: UpstreamCapabilities, request: GenerateRequest, thoughts: ThoughtTags | None
) -> None:
    """Raises BadRequest for a parameter that no request to this upstream can express.

    thoughts: the family's tags of reasoning; None if it has none that a message can have.
    """
    for name, why in _inexpressible(can, request, thoughts):
        raise BadRequest(
            f"`{name}` can't be used with {id}, which is on another server: {why}.", param=name
        )


def _inexpressible(
    can: UpstreamCapabilities, request: GenerateRequest, thoughts: ThoughtTags | None
) -> Iterator[tuple[str, str]]:
    names = request.param_names
    if request.thinking_budget is not None and not can.thinking_budget:
        name = names.get("chat_template_kwargs.thinking_budget", "thinking_budget")
        if not can.continue_message:
            yield name, "its `capabilities` have neither `thinking_budget` nor `continue_message`"
        if thoughts is None:
            yield name, "its family has no tags around its reasoning that a message could close"
        if not all(isinstance(p, Conversation) and not p.continued for p in request.prompts):
            yield name, "its reasoning is limited in answers to messages that begin anew only"
    if request.max_response_tokens is not None:
        yield "max_response_tokens", "its reasoning and its answer can't be counted apart"
    if request.logprobs is not None and not can.logprobs:
        yield "logprobs", "its `capabilities` say that it sends none"
    if request.echo:
        yield "echo", "prompts are not read from other servers"
    if request.prompt_logprobs is not None:
        yield "prompt_logprobs", "prompts are not read from other servers"
    if request.token_ids:
        yield "return_token_ids", "its answers are texts"
    if request.raw_messages:
        yield "enable_response_messages", "it sends no messages of its own format"
    if request.logit_bias and not can.logit_bias:
        yield "logit_bias", "its `capabilities` say that it takes none"
    if request.seed is not None and not can.seed:
        yield "seed", "its `capabilities` say that it takes none"
    for allowed, group in ((can.sampling, NEW_SAMPLING), (can.penalties, PENALTIES)):
        for name in group if not allowed else ():
            if name in request.choices:
                yield name, "its `capabilities` say that it does not take it"
    is_pattern = isinstance(request.format, RegexFormat | ChoiceFormat | GrammarFormat)
    if is_pattern and not can.structured_outputs:
        yield request.format_param, "its `capabilities` have no `structured_outputs`"
    for prompt in request.prompts:
        if not isinstance(prompt, Conversation) and not can.completions:
            yield "prompt", "it has no `/completions`; send `messages` to /v1/chat/completions"
        if isinstance(prompt, Conversation) and prompt.continued and not can.continue_message:
            yield "messages", "it can't continue the last message, which is the assistant's"


def ignored(can: UpstreamCapabilities, request: GenerateRequest) -> tuple[str, ...]:
    """The parameters that the client set and that this upstream ignores."""
    found = dict.fromkeys(_ignored(can, request))
    return tuple(request.param_names.get(name, name) for name in found)


def _ignored(can: UpstreamCapabilities, request: GenerateRequest) -> Iterator[str]:
    if request.continuous_usage:
        yield "stream_options.continuous_usage_stats"
    if request.progress:
        yield "return_progress"
    if request.special_tokens and not can.special_tokens:
        yield "skip_special_tokens"
    for prompt in request.prompts:
        if not isinstance(prompt, Conversation):
            continue
        for name in prompt.template_kwargs:
            passed = (
                can.reasoning_effort if name == "reasoning_effort" else can.chat_template_kwargs
            )
            if not passed and name not in request.implied:
                yield f"chat_template_kwargs.{name}"
        if any(message.reasoning for message in prompt.messages) and not can.reasoning_messages:
            yield "messages.reasoning_content"
        sends_extra = can.extra_content and can.tools and can.tool_messages
        if has_extra_content(prompt) and not sends_extra:
            yield EXTRA_CONTENT
        for message in prompt.messages:
            yield from (each.place for each in message.media if not shows(each, message, can))


def request_of(
    can: UpstreamCapabilities,
    request: GenerateRequest,
    prompt: Prompt,
    choice: int,
    *,
    thoughts: ThoughtTags | None = None,
    tells_format: bool = False,
) -> UpstreamRequest:
    """Makes the request for one answer.

    choice: the number of the answer among the `n`. tells_format: whether the prompt describes the
    answer's format even if the upstream takes a schema, since it did not follow it before.
    """
    body = dict(_sampling(can, request, choice))
    if not isinstance(prompt, Conversation):
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
        if request.special_tokens and can.special_tokens:
            body["skip_special_tokens"] = False
        return UpstreamRequest(COMPLETIONS, {"prompt": prompt, **body})
    in_prompt = prompt.response_format is not None and (tells_format or not can.json_schema)
    messages = messages_of(prompt, can, request.tool_choice, tells_format=in_prompt)
    body = {"messages": messages, **body, **dict(_tools(can, request, prompt))}
    body |= dict(_format(can, request)) | dict(_template(can, request, prompt))
    if request.logprobs is not None:
        body |= {"logprobs": True, **({"top_logprobs": top} if (top := request.logprobs) else {})}
    budget = None if can.thinking_budget else request.thinking_budget
    if budget is None or thoughts is None:
        return UpstreamRequest(CHAT, body)
    thinking = LimitedThoughts(body, thoughts, budget, can.max_tokens_field)
    return UpstreamRequest(CHAT, body, thinking)


def _sampling(
    can: UpstreamCapabilities, request: GenerateRequest, choice: int
) -> Iterator[tuple[str, Any]]:
    for name, value in request.choices.items():
        if (name in NEW_SAMPLING and not can.sampling) or (name in PENALTIES and not can.penalties):
            continue  # it is a default of models.yaml, since `check` refuses a client's value
        yield name, value
    if request.max_tokens is not None:
        yield can.max_tokens_field, request.max_tokens
    if request.stop and can.stop:
        yield "stop", list(request.stop[:STOPS])
    if request.thinking_budget is not None and can.thinking_budget:
        yield "thinking_budget", request.thinking_budget
    if request.seed is not None:
        yield "seed", request.seed + choice
    if request.logit_bias:
        yield "logit_bias", {str(token): bias for token, bias in request.logit_bias.items()}
    if can.stream_usage:
        yield "stream_options", {"include_usage": True}


def _tools(
    can: UpstreamCapabilities, request: GenerateRequest, prompt: Conversation
) -> Iterator[tuple[str, Any]]:
    if not (can.tools and prompt.tools):
        return
    choice = request.tool_choice
    if choice == "none" and not can.tool_choice:
        return
    yield (
        "tools",
        [
            {
                "type": "function",
                "function": function_json(t) | ({"strict": True} if t.strict else {}),
            }
            for t in prompt.tools
        ],
    )
    if can.tool_choice and choice != "auto":
        yield (
            "tool_choice",
            {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, NamedTool)
            else choice,
        )
    if can.parallel_tool_calls and not request.parallel_calls:
        yield "parallel_tool_calls", False


def _format(can: UpstreamCapabilities, request: GenerateRequest) -> Iterator[tuple[str, Any]]:
    match request.format:
        case JsonFormat(schema=schema) if can.json_schema and schema in ANY_OBJECT:
            yield "response_format", {"type": "json_object"}
        case JsonFormat(schema, strict, name, description) if can.json_schema:
            described = {"description": description} if description else {}
            found = {"name": name or "answer", "schema": schema, "strict": strict, **described}
            yield "response_format", {"type": "json_schema", "json_schema": found}
        case RegexFormat(pattern):
            yield "structured_outputs", {"regex": pattern}
        case ChoiceFormat(options):
            yield "structured_outputs", {"choice": list(options)}
        case GrammarFormat(source):
            yield "structured_outputs", {"grammar": source}


def _template(
    can: UpstreamCapabilities, request: GenerateRequest, prompt: Conversation
) -> Iterator[tuple[str, Any]]:
    said = {k: v for k, v in prompt.template_kwargs.items() if k not in request.implied}
    effort = said.pop("reasoning_effort", None)
    if effort is not None and can.reasoning_effort:
        yield "reasoning_effort", effort
    if said and can.chat_template_kwargs:
        yield "chat_template_kwargs", said
    if prompt.continued:
        yield from CONTINUED.items()
