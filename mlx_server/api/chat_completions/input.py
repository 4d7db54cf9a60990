"""The wire to a request of ours."""

import json
from collections.abc import Sequence
from typing import Any

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
from mlx_server.api.tools import check_choice, check_offered
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import GenerateRequest, Named, ToolChoice

SOME_EFFORT = "medium"
"""Of who wants thinking and does not say how much."""


def to_request(body: ChatBody) -> GenerateRequest:
    _refuse(body)
    tools, tool_choice = _tools(body)
    constrained = body.constrained()
    budget = _thinking_budget(body)
    conversation = Conversation(
        messages=messages(body.messages),
        tools=tools,
        template_kwargs=_template_kwargs(body, budget),
        response_format=formats.told(constrained["format"]),
    )
    return GenerateRequest(
        model=body.model,
        **body.adapted(),
        **constrained,
        whole=not body.stream,
        prompts=(conversation,),
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=body.stops(),
        choices=body.choices(),
        logit_bias=body.biases(),
        seed=body.seed,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tool_choice=tool_choice,
        thinking_budget=budget,
        max_response_tokens=body.max_response_tokens,
        parallel_calls=body.parallel_tool_calls is not False,
    )


def messages(given: Sequence[MessageParam]) -> tuple[Message, ...]:
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(given))


def _refuse(body: ChatBody) -> None:
    """What is known, well-formed, and not to be had."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    if body.modalities and body.modalities != ["text"]:
        raise BadRequest("`modalities` can only be `text` here.", param="modalities")


def _tools(body: ChatBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Those that the model may call, and whether it has to."""
    tools = tuple(_tool(tool) for tool in body.tools or ())
    match body.tool_choice:
        case AllowedToolsChoice(allowed_tools=allowed):
            names = {choice.function.name for choice in allowed.tools}
            for name in names:
                check_offered(name, tools)
            return tuple(tool for tool in tools if tool.name in names), allowed.mode
        case FunctionChoice(function=function):
            choice: ToolChoice = Named(function.name)
        case said:
            choice = said or "auto"
    check_choice(choice, tools)
    return tools, choice


def _thinking_budget(body: ChatBody) -> int | None:
    """By whichever of its names."""
    given = {
        "thinking_budget": body.thinking_budget,
        "thinking.budget_tokens": body.thinking.budget_tokens if body.thinking else None,
        "chat_template_kwargs.thinking_budget": _templates_budget(body.chat_template_kwargs or {}),
    }
    found = [(name, budget) for name, budget in given.items() if budget is not None]
    if len(found) > 1:
        (one, _), (other, _) = found[:2]
        raise BadRequest(
            f"`{one}` and `{other}` are two names for the same: send one.", param=other
        )
    return found[0][1] if found else None


def _templates_budget(kwargs: dict[str, Any]) -> int | None:
    """As Qwen and Seed-OSS name it; what else a template may take there, -1 for example, is none
    that the engine could keep."""
    budget = kwargs.get("thinking_budget")
    return budget if type(budget) is int and 0 <= budget < 2**53 else None


def _effort(body: ChatBody) -> str | None:
    if body.thinking is None:
        return body.reasoning_effort
    is_off = body.thinking.type == "disabled"
    if is_off and body.thinking.budget_tokens is not None:
        raise BadRequest(
            "`thinking.budget_tokens` needs `thinking.type: enabled`.",
            param="thinking.budget_tokens",
        )
    if body.reasoning_effort and is_off != (body.reasoning_effort == "none"):
        raise BadRequest(
            f"`thinking.type: {body.thinking.type}` and `reasoning_effort: "
            f"{body.reasoning_effort}` contradict each other: send one of them.",
            param="reasoning_effort",
        )
    return body.reasoning_effort or ("none" if is_off else SOME_EFFORT)


def _template_kwargs(body: ChatBody, budget: int | None) -> dict[str, Any]:
    """Some templates tell the model of its budget, too."""
    ours = {"reasoning_effort": _effort(body), "thinking_budget": budget}
    told = {name: value for name, value in ours.items() if value is not None}
    return {**told, **(body.chat_template_kwargs or {})}


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
