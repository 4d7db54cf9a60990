"""Converts a /generate body to a `GenerateRequest`."""

from typing import TypedDict

from mlx_server.api import formats
from mlx_server.api.chat_completions.messages import messages
from mlx_server.api.chat_completions.protocol import FunctionName
from mlx_server.api.native.protocol import NativeBody
from mlx_server.api.tool_choice import check_choice
from mlx_server.errors import BadRequest
from mlx_server.families.base import ModelFamily
from mlx_server.families.table import rows
from mlx_server.messages import Conversation, Tool
from mlx_server.parsers.reasoning_tags import NAMES
from mlx_server.requests import GenerateRequest, NamedTool, ToolChoice

USUAL_TAGS = [name for tag in NAMES for name in (tag, f"<{tag}>")]
USUAL_PARSERS = ["hermes", "openai"]
"""The parsers that clients of this API name. They are accepted for every family: the model's own
parser reads the answers, and it knows these tags, and calls as JSON, wherever a model can write
them."""


class TokenLimits(TypedDict):
    max_tokens: int | None
    thinking_budget: int | None
    max_response_tokens: int | None


def to_request(body: NativeBody, model: str, family: ModelFamily) -> GenerateRequest:
    if body.stream:
        raise BadRequest(
            "/generate does not stream: send `stream: true` to /v1/chat/completions.",
            param="stream",
        )
    _check_known("think_tag", body.think_tag, [*USUAL_TAGS, *_think_tags(family)])
    _check_known("tool_parser", body.tool_parser, [*USUAL_PARSERS, family.name])
    tools = tuple(Tool(t.name, t.description, t.parameters or {}) for t in body.tools or ())
    choice = _choice(body)
    check_choice(choice, tools)
    asked = list(formats.of_response_format(body.response_format))
    constrained = formats.the_only_format(asked, otherwise="response_format")
    conversation = Conversation(
        messages(body.messages),
        tools,
        response_format=formats.prompt_description(constrained["format"]),
        continue_final_message=body.continues(),
    )
    return GenerateRequest(
        model=model,
        **body.shared_fields(),
        include_raw=body.include_raw,
        **constrained,
        **_limits(body),
        buffered=True,
        prompts=(conversation,),
        tool_choice=choice,
        param_names={"chat_template_kwargs.thinking_budget": "max_thinking_tokens"},
    )


def _limits(body: NativeBody) -> TokenLimits:
    thinking, response = body.max_thinking_tokens, body.max_response_tokens
    if body.two_pass is not False:
        return {
            "max_tokens": None,
            "thinking_budget": thinking,
            "max_response_tokens": response,
        }
    if thinking is not None and response is None:
        raise BadRequest(
            "`two_pass: false` uses the sum of both limits: send `max_response_tokens` too.",
            param="max_thinking_tokens",
        )
    both = None if response is None else (thinking or 0) + response
    return {"max_tokens": both, "thinking_budget": None, "max_response_tokens": None}


def _choice(body: NativeBody) -> ToolChoice:
    if isinstance(body.tool_choice, FunctionName):
        return NamedTool(body.tool_choice.name)
    return body.tool_choice or "auto"


def _think_tags(family: ModelFamily) -> list[str]:
    """The delimiters that open the family's reasoning, with and without their brackets."""
    ((*_, shapes, _),) = rows([family])
    opening = [shape.partition("…")[0] for shape in shapes]
    return [name for delimiter in opening for name in (delimiter.strip("<>[]|"), delimiter)]


def _check_known(param: str, given: str | None, known: list[str]) -> None:
    if given is not None and given not in known:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(known))
        raise BadRequest(f"With this model `{param}` should be one of {names}.", param=param)
