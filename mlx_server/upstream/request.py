"""Writes a request as a body of OpenAI's chat completions or completions for an upstream.

A field that the upstream lacks is refused by name, replaced by text in the prompt, or listed as
ignored.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.errors import BadRequest
from mlx_server.messages import (
    EXTRA_CONTENT,
    INSTRUCTION_ROLES,
    ContentPart,
    Conversation,
    Media,
    Message,
    Tool,
    ToolCall,
    content_of,
    has_extra_content,
)
from mlx_server.prompts.history_rendering import in_hermes_tags
from mlx_server.prompts.message_normalization import (
    RESULT_BEGIN,
    RESULT_END,
    OwnText,
    Part,
    format_text,
    function_json,
    tools_text,
)
from mlx_server.requests import (
    DETERMINISTIC_HEADER,
    ChoiceFormat,
    GenerateRequest,
    GrammarFormat,
    Infill,
    JsonFormat,
    NamedTool,
    Prompt,
    RegexFormat,
    ToolChoice,
)
from mlx_server.upstream.dialects import CHAT, COMPLETIONS, DETAILS
from mlx_server.upstream.spec import UpstreamCapabilities
from mlx_server.upstream.text_families import ThoughtTags

ANY_OBJECT: tuple[object, ...] = ({"type": "object"}, {}, True)

NEW_SAMPLING = ("top_k", "min_p", "repetition_penalty")
PENALTIES = ("presence_penalty", "frequency_penalty")


STOPS = 4
"""The most stop strings that are sent to an upstream, since OpenAI's API takes no more. All of the
client's are also enforced here."""

CONTINUED: Mapping[str, bool] = {"continue_final_message": True, "add_generation_prompt": False}


@dataclass(frozen=True)
class LimitedThoughts:
    """The bodies of the two requests for one answer."""

    body: Mapping[str, Any]
    """The body of the request without a limit of its thoughts."""
    tags: ThoughtTags
    budget: int
    limit: str
    """The upstream's name for `max_tokens`."""

    def first(self) -> Mapping[str, Any]:
        """The body of the first request. If the budget is 0, it is that of the second one."""
        if not self.budget:
            return self.second("", "", 0)
        most = min(self.budget, self.body.get(self.limit, self.budget))
        stops = [*self.body.get("stop", ())[: STOPS - 1], self.tags.closing]
        return {**self.body, self.limit: most, "stop": stops}

    def second(self, thoughts: str, content: str, spent: int) -> Mapping[str, Any]:
        """The body of the second request. spent: the tokens that the first one used."""
        begun = {"role": "assistant", "content": self.tags.begun(thoughts, content)}
        body = {**self.body, "messages": [*self.body["messages"], begun], **CONTINUED}
        if self.limit in body:
            body[self.limit] = max(1, body[self.limit] - spent)
        return body


@dataclass(frozen=True)
class UpstreamRequest:
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
    names = dict.fromkeys(_ignored(can, request))
    return tuple(request.param_names.get(name, name) for name in names)


def _ignored(can: UpstreamCapabilities, request: GenerateRequest) -> Iterator[str]:
    if request.progress:
        yield "return_progress"
    if request.prediction:
        yield "prediction"
    if request.deterministic:
        yield DETERMINISTIC_HEADER
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
        if has_extra_content(prompt) and not (can.extra_content and can.tools):
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
        if isinstance(prompt, Infill):
            files = "".join(f"{file.name}\n{file.text}\n\n" for file in prompt.files)
            body |= {"suffix": prompt.suffix}
            prompt = files + prompt.prefix
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
    functions = (function_json(t) | ({"strict": True} if t.strict else {}) for t in prompt.tools)
    yield "tools", [{"type": "function", "function": function} for function in functions]
    if can.tool_choice and isinstance(choice, NamedTool):
        yield "tool_choice", {"type": "function", "function": {"name": choice.name}}
    elif can.tool_choice and choice != "auto":
        yield "tool_choice", choice
    if can.parallel_tool_calls and not request.parallel_calls:
        yield "parallel_tool_calls", False


def _format(can: UpstreamCapabilities, request: GenerateRequest) -> Iterator[tuple[str, Any]]:
    match request.format:
        case JsonFormat(schema=schema) if can.json_schema and schema in ANY_OBJECT:
            yield "response_format", {"type": "json_object"}
        case JsonFormat(schema, strict, name, description) if can.json_schema:
            described = {"description": description} if description else {}
            fields = {"name": name or "answer", "schema": schema, "strict": strict, **described}
            yield "response_format", {"type": "json_schema", "json_schema": fields}
        case RegexFormat(pattern):
            yield "structured_outputs", {"regex": pattern}
        case ChoiceFormat(options):
            yield "structured_outputs", {"choice": list(options)}
        case GrammarFormat(source):
            yield "structured_outputs", {"grammar": source}


def _template(
    can: UpstreamCapabilities, request: GenerateRequest, prompt: Conversation
) -> Iterator[tuple[str, Any]]:
    variables = {k: v for k, v in prompt.template_kwargs.items() if k not in request.implied}
    effort = variables.pop("reasoning_effort", None)
    if effort is not None and can.reasoning_effort:
        yield "reasoning_effort", effort
    if variables and can.chat_template_kwargs:
        yield "chat_template_kwargs", variables
    if prompt.continued:
        yield from CONTINUED.items()


Wire = dict[str, Any]

NO_RESULT = "This call has no result."
FOLLOWS = "it follows in the next message"


def messages_of(
    conversation: Conversation, can: UpstreamCapabilities, choice: ToolChoice, *, tells_format: bool
) -> list[Wire]:
    """The messages of a conversation. tells_format: whether the system prompt describes the format
    of the answer."""
    last = max(
        (i for i, each in enumerate(conversation.messages) if each.role == "user"), default=0
    )
    every = can.reasoning_messages is True
    thoughts = [
        replace(message, reasoning=message.reasoning if every or i > last else None)
        for i, message in enumerate(conversation.messages)
    ]
    messages = [_wire(message, can) for message in with_matching_results(thoughts, can)]
    if not can.tools:
        messages = with_tools_in_prompt(messages, conversation.tools, choice)
    if conversation.response_format and tells_format:
        messages = with_system_prompt(messages, format_text(conversation.response_format))
    return messages


def with_tools_in_prompt(
    messages: Iterable[Wire], tools: Iterable[Tool], choice: ToolChoice
) -> list[Wire]:
    """The messages for a server without tool calling: the system prompt describes the tools in the
    format of Hermes models, and earlier calls and their results are text."""
    texts = [as_text(message) for message in messages]
    tools = list(tools)
    if choice == "none" or not tools:
        return texts
    described: list[Part] = [*tools_text(tools)]
    if isinstance(choice, NamedTool):
        described.append(OwnText(f"\n\nCall the function {choice.name} now."))
    elif choice == "required":
        described.append(OwnText("\n\nCall one of the functions now."))
    return with_system_prompt(texts, described)


def with_matching_results(
    messages: Iterable[Message], can: UpstreamCapabilities
) -> Iterator[Message]:
    """The messages as OpenAI's API demands them: calls are followed by their results and no others,
    which are text. Media in results, and results without a call, become messages of the user."""
    unanswered: dict[str, None] = {}
    after: list[Message] = []
    for message in messages:
        if message.role != "tool":
            yield from (Message("tool", NO_RESULT, tool_call_id=id) for id in unanswered)
            yield from after
            unanswered, after = dict.fromkeys(call.id for call in message.tool_calls), []
            yield message
        elif (id := message.tool_call_id or "") in unanswered:
            del unanswered[id]
            yield message
            if shown := [each for each in message.media if can.takes(each)]:
                after.append(Message("user", parts=tuple(shown)))
        else:
            framed = _framed(RESULT_BEGIN.text, message.content, RESULT_END.text)
            after.append(Message("user", str(framed)))
    yield from after


def shows(medium: Media, message: Message, can: UpstreamCapabilities) -> bool:
    return can.takes(medium) and message.role in ("user", "tool")


def _content(message: Message, can: UpstreamCapabilities) -> str | list[Wire]:
    parts = [(part, _shown(part, message, can)) for part in message.parts]
    if not any(shown for _, shown in parts):
        return message.content
    if message.role == "tool":
        return content_of(
            [
                replace(part, why=FOLLOWS) if isinstance(part, Media) and shown else part
                for part, shown in parts
            ]
        )
    return [dict(shown or {"type": "text", "text": content_of([part])}) for part, shown in parts]


def _shown(
    part: ContentPart, message: Message, can: UpstreamCapabilities
) -> Mapping[str, Any] | None:
    return part.part if isinstance(part, Media) and shows(part, message, can) else None


def as_text(message: Wire) -> Wire:
    """The message for a server without tools, with calls and results as text in the format of
    Hermes models."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": _framed(RESULT_BEGIN.text, content, RESULT_END.text)}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [ToolCall("", each["name"], each["arguments"] or "{}") for each in functions]
    written = in_hermes_tags(calls, lambda text: text)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _framed("", content, f"\n{written}" if content else written)}


def with_system_prompt(messages: Sequence[Wire], added: Iterable[Part]) -> list[Wire]:
    """The messages with a paragraph at the end of their leading system prompt."""
    # another server tokenises all text alike, so control tokens in `OwnText` need no marking
    text = "".join(part.text if isinstance(part, OwnText) else str(part) for part in added)
    others = (i for i, each in enumerate(messages) if each.get("role") not in INSTRUCTION_ROLES)
    leading = next(others, len(messages))
    if not leading:
        return [{"role": "system", "content": text}, *messages]
    last = messages[leading - 1]
    content = last.get("content")
    extended = {**last, "content": _framed("", content, f"\n\n{text}") if content else text}
    return [*messages[: leading - 1], extended, *messages[leading:]]


def _wire(message: Message, can: UpstreamCapabilities) -> Wire:
    role = message.role
    if role == "developer" and not can.developer_role:
        role = "system"
    # the content is never null, since some servers fail for it
    wire: Wire = {"role": role, "content": _content(message, can)}
    if message.name and role != "tool":
        wire["name"] = message.name
    if message.tool_call_id and role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    details = _details(message) if can.extra_content else None
    if details:  # they contain the reasoning's text
        wire[DETAILS] = details
    elif message.reasoning and can.reasoning_messages:
        wire[can.reasoning_field] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = list(_calls(message, can))
    return wire


def _calls(message: Message, can: UpstreamCapabilities) -> Iterator[Wire]:
    for call in message.tool_calls:
        function = {"name": call.name, "arguments": call.arguments or "{}"}
        extra = {k: v for k, v in (call.extra_content or {}).items() if k != DETAILS}
        signed = {"extra_content": extra} if extra and can.extra_content else {}
        yield {"id": call.id, "type": "function", "function": function, **signed}


def _details(message: Message) -> Any:
    """The message's `reasoning_details`, which are stored with its first call."""
    extras = (call.extra_content or {} for call in message.tool_calls)
    return next((details for extra in extras if (details := extra.get(DETAILS))), None)


def _framed(before: str, content: str | list[Wire], after: str) -> str | list[Wire]:
    """A content, which may be text or parts, with a text before and after it."""
    if isinstance(content, str):
        return f"{before}{content}{after}"
    first, last = ([{"type": "text", "text": text}] if text else [] for text in (before, after))
    return [*first, *content, *last]


def without_media(messages: Sequence[Wire]) -> list[Wire]:
    contents = ((message, message.get("content")) for message in messages)
    return [
        {**message, "content": [part for part in content if part["type"] == "text"]}
        if isinstance(content, list)
        else message
        for message, content in contents
    ]
