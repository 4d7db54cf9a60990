"""Converts a chat completions body to a `GenerateRequest`."""

import json
from collections.abc import Sequence

from mlx_server.api import formats
from mlx_server.api.chat_completions.protocol import (
    AllowedToolsChoice,
    ChatBody,
    FunctionChoice,
    MessageParam,
    ToolCallParam,
    ToolParam,
)
from mlx_server.api.content import text_of
from mlx_server.api.tool_choice import check_choice, check_offered
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import GenerateRequest, NamedTool, ToolChoice


def to_request(body: ChatBody) -> GenerateRequest:
    _refuse(body)
    tools, tool_choice = _tools(body)
    constrained = body.constrained()
    conversation = Conversation(
        messages=messages(body.messages),
        tools=tools,
        template_kwargs=body.template_kwargs(body.reasoning_effort, "reasoning_effort"),
        response_format=formats.prompt_description(constrained["format"]),
    )
    return GenerateRequest(
        model=body.model,
        **body.adapter_choice(),
        **constrained,
        buffered=not body.stream,
        progress=body.include_progress,
        prompts=(conversation,),
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=body.stops(),
        choices=body.choices(),
        logit_bias=body.biases(),
        seed=body.seed,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tool_choice=tool_choice,
        thinking_budget=body.budget(),
        implied=body.implied_sampling(body.reasoning_effort),
        max_response_tokens=body.max_response_tokens,
        parallel_calls=body.parallel_tool_calls is not False,
    )


def messages(given: Sequence[MessageParam]) -> tuple[Message, ...]:
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(given))


def _refuse(body: ChatBody) -> None:
    """Raises BadRequest for valid fields whose values are not supported."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    if body.modalities and body.modalities != ["text"]:
        raise BadRequest('`modalities` should be `["text"]`.', param="modalities")


def _tools(body: ChatBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model may call, and whether it has to call one."""
    tools = tuple(_tool(tool) for tool in body.tools or ())
    match body.tool_choice:
        case AllowedToolsChoice(allowed_tools=allowed):
            names = {choice.function.name for choice in allowed.tools}
            for name in names:
                check_offered(name, tools)
            return tuple(tool for tool in tools if tool.name in names), allowed.mode
        case FunctionChoice(function=function):
            choice: ToolChoice = NamedTool(function.name)
        case given:
            choice = given or "auto"
    check_choice(choice, tools)
    return tools, choice


def _message(message: MessageParam, where: str) -> Message:
    if message.role == "tool" and not message.tool_call_id:
        raise BadRequest(
            "A `tool` message needs the `tool_call_id` that it answers.",
            param=f"{where}.tool_call_id",
        )
    return Message(
        role=message.role,
        content=text_of(message.content, f"{where}.content") or message.refusal or "",
        name=message.name,
        reasoning=message.reasoning_content or message.reasoning,
        tool_calls=tuple(_tool_call(call) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
    )


def _tool_call(call: ToolCallParam) -> ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call.id, call.function.name, text)


def _tool(tool: ToolParam) -> Tool:
    function = tool.function
    return Tool(
        function.name, function.description, function.parameters or {}, bool(function.strict)
    )
