"""Converts a chat completions body to a `GenerateRequest`.

Messages come in the forms of today and of earlier APIs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from mlx_server.api import formats
from mlx_server.api.chat_completions.protocol import (
    AllowedToolsChoice,
    ChatBody,
    FreeformCall,
    FreeformCallParam,
    FreeformChoice,
    FreeformToolParam,
    FunctionCall,
    FunctionCallParam,
    FunctionChoice,
    FunctionName,
    FunctionParam,
    FunctionToolParam,
    GrammarParam,
    MessageParam,
    OtherToolParam,
    ToolCallParam,
)
from mlx_server.api.content import part_text, parts_of, thoughts_of
from mlx_server.api.fields import check_stream_options
from mlx_server.api.freeform import arguments_of_text, freeform_tool
from mlx_server.api.roles import role_of
from mlx_server.api.tool_choice import check_choice, check_offered, check_usable
from mlx_server.errors import BadRequest
from mlx_server.messages import (
    UNNAMED,
    Conversation,
    Message,
    Tool,
    ToolCall,
    content_of,
    media_parts,
)
from mlx_server.requests import GenerateRequest, NamedTool, ToolChoice


def messages(given: Sequence[MessageParam]) -> tuple[Message, ...]:
    return tuple(_converted(given))


def _converted(given: Sequence[MessageParam]) -> Iterator[Message]:
    unanswered: list[ToolCall] = []
    for i, message in enumerate(given):
        calls = _calls(message, i)
        id, role = message.tool_call_id, role_of(message.role)
        parts = parts_of(message.content, f"messages[{i}].content")
        if role == "assistant":
            unanswered = list(calls)
        elif role == "tool":
            id = id or _answered(message, unanswered)
            unanswered = [call for call in unanswered if call.id != id]
        yield Message(
            role=role,
            content=content_of(parts) or message.refusal or "",
            name=message.name,
            reasoning=_reasoning(message),
            tool_calls=calls,
            tool_call_id=id,
            parts=media_parts(parts),
        )


def _reasoning(message: MessageParam) -> str | None:
    given = message.reasoning_content or message.reasoning
    if given is None or isinstance(given, str):
        return given or "\n\n".join(thoughts_of(message.content)) or None
    return part_text({"content": given})


def _answered(message: MessageParam, unanswered: Sequence[ToolCall]) -> str | None:
    """The id of the call that a result without an id answers: the next one, of its name if it has
    one."""
    return next((call.id for call in unanswered if message.name in (None, call.name)), None)


def _calls(message: MessageParam, place: int) -> tuple[ToolCall, ...]:
    calls = tuple(_with_details(map(_call, message.tool_calls or ()), message))
    if calls or (function := message.function_call) is None:
        return calls
    return (ToolCall(f"function_call_{place}", function.name or UNNAMED, function.arguments or ""),)


def _call(call: ToolCallParam) -> ToolCall:
    match call:
        case FreeformCallParam(custom=FreeformCall() as custom):
            name, arguments = custom.name, arguments_of_text(custom.input or "")
        case FreeformCallParam() | FunctionCallParam(function=None):
            name, arguments = "", ""
        case FunctionCallParam(function=FunctionCall() as function):
            name, arguments = function.name, function.arguments or ""
    return ToolCall(call.id or "", name or UNNAMED, arguments, extra_content=call.extra_content)


def _with_details(calls: Iterable[ToolCall], message: MessageParam) -> Iterator[ToolCall]:
    """The calls, of which the first has the details of the reasoning before it."""
    details = {"reasoning_details": found} if (found := message.reasoning_details) else {}
    for call in calls:
        extra = {**(call.extra_content or {}), **details}
        yield replace(call, extra_content=extra) if details else call
        details = {}


def to_request(body: ChatBody) -> GenerateRequest:
    _refuse(body)
    tools, tool_choice = _tools(body)
    constrained = body.constrained()
    conversation = Conversation(
        messages=messages(body.messages),
        tools=tools,
        template_kwargs=body.template_kwargs(body.effort, body.effort_param),
        response_format=formats.prompt_description(constrained["format"]),
        continue_final_message=body.continues(),
    )
    return GenerateRequest(
        model=body.model,
        **body.shared_fields(),
        include_raw=body.include_raw,
        **constrained,
        buffered=not body.stream,
        progress=body.include_progress,
        continuous_usage=body.counts_tokens,
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        prompts=(conversation,),
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tool_choice=tool_choice,
        thinking_budget=body.budget(),
        implied=body.implied_sampling(body.effort),
        param_names=_param_names(body),
        max_response_tokens=body.max_response_tokens,
        parallel_calls=body.parallel_tool_calls is not False and not body.is_legacy,
    )


def echoed(body: ChatBody, request: GenerateRequest) -> str:
    """The text of the last message, where the answer is to repeat it."""
    (conversation,) = request.prompts
    assert isinstance(conversation, Conversation)
    is_repeated = body.echo and body.messages[-1].role == "assistant"
    return conversation.messages[-1].content if is_repeated else ""


def _param_names(body: ChatBody) -> dict[str, str]:
    thinking = body.param_names(body.effort, body.effort_param)
    return {**thinking, "tools": "functions"} if body.is_legacy else thinking


def _refuse(body: ChatBody) -> None:
    """Raises BadRequest for valid fields whose values are not supported."""
    check_stream_options(body.stream, body.stream_options)
    body.refuse_streamed_prompts()
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    if body.modalities and body.modalities != ["text"]:
        raise BadRequest('`modalities` should be `["text"]`.', param="modalities")


def _tools(body: ChatBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model may call, and whether it has to call one."""
    if body.is_legacy:
        return _functions(body)
    usable = [tool for tool in body.tools or () if not isinstance(tool, OtherToolParam)]
    if not usable and body.tool_choice != "none":
        check_usable([tool.type for tool in body.tools or ()])
    tools = tuple(map(_tool, usable))
    _refuse_shared_names(body, tools)
    match body.tool_choice:
        case AllowedToolsChoice(allowed_tools=allowed):
            for each in allowed.tools:
                _check_kind(each, body)
            names = {choice.name for choice in allowed.tools}
            for name in names:
                check_offered(name, tools)
            return tuple(tool for tool in tools if tool.name in names), allowed.mode
        case FunctionChoice() | FreeformChoice() as named:
            _check_kind(named, body)
            choice: ToolChoice = NamedTool(named.name)
        case given:
            choice = given or "auto"
    check_choice(choice, tools)
    return tools, choice


def _check_kind(choice: FunctionChoice | FreeformChoice, body: ChatBody) -> None:
    """Raises BadRequest for the name of a function as that of a custom tool, or the reverse."""
    if isinstance(choice, FreeformChoice) != (choice.name in body.freeform_names):
        raise BadRequest(
            f"`tool_choice` names {choice.name[:64]!r} of type {choice.type!r}, which is not among "
            "the `tools`.",
            param="tool_choice",
        )


def _functions(body: ChatBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The same in the form that came before `tools`."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, new) is not None:
            raise BadRequest(
                f"`{new}` replaces `{old}`: don't mix `functions` and `function_call` with "
                "`tools` and `tool_choice`.",
                param=new,
            )
    functions = tuple(map(_function, body.functions or ()))
    if not isinstance(body.function_call, FunctionName):
        return functions, body.function_call or "auto"
    name = body.function_call.name
    if name not in {function.name for function in functions}:
        raise BadRequest(
            f"`function_call` names {name[:64]!r}, which is not among the `functions`.",
            param="function_call",
        )
    return functions, NamedTool(name)


def _refuse_shared_names(body: ChatBody, tools: Sequence[Tool]) -> None:
    """Raises BadRequest if a function has the name of a custom tool: calls could mean either."""
    names = Counter(tool.name for tool in tools)
    for name in body.freeform_names:
        if names[name] > 1:
            raise BadRequest(
                f"Two `tools` have the name {name[:64]!r}: give each its own.", param="tools"
            )


def _tool(tool: FunctionToolParam | FreeformToolParam) -> Tool:
    if isinstance(tool, FreeformToolParam):
        format = tool.custom.format
        grammar = format.grammar if isinstance(format, GrammarParam) else None
        return freeform_tool(tool.custom.name, tool.custom.description, grammar)
    return _function(tool.function)


def _function(function: FunctionParam) -> Tool:
    return Tool(
        function.name, function.description, function.parameters or {}, bool(function.strict)
    )
