"""`POST /generate` on the wire: thinking and answer in separate fields, with separate limits."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api import formats
from mlx_server.api.accumulator import Accumulator, Wire
from mlx_server.api.chat_completions.input import ChatMessagesBody, FunctionName, messages
from mlx_server.api.fields import (
    DescribedFunction,
    Items,
    ResponseTokens,
    SamplingBody,
    ThinkingTokens,
    check_choice,
    check_number,
)
from mlx_server.api.formats import ResponseFormat
from mlx_server.api.handlers import documented, read, respond_buffered, while_connected
from mlx_server.api.models import model_or_default
from mlx_server.errors import BadRequest
from mlx_server.events import Event, ToolCallStarted
from mlx_server.http import strict_json
from mlx_server.http.security import keyed_router
from mlx_server.messages import Conversation, ToolCall
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread_if_large
from mlx_server.requests import GenerateRequest, NamedTool

ELSEWHERE = "use /v1/chat/completions"


class NativeBody(SamplingBody, ChatMessagesBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **SamplingBody.UNSUPPORTED,
        "n": ELSEWHERE,
        "structured_outputs": ELSEWHERE,
    }

    model: Annotated[str, Field(min_length=1)] | None = None
    """The first model of models.yaml by default."""
    stream: bool | None = None
    two_pass: bool | None = None
    """False: thinking and answer share one limit, the sum of both."""
    think_tag: Annotated[str, Field(min_length=1)] | None = None
    max_thinking_tokens: ThinkingTokens | None = None
    max_response_tokens: ResponseTokens | None = None
    tools: Annotated[Items[DescribedFunction], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionName | None = None
    response_format: ResponseFormat | None = None
    tool_parser: Annotated[str, Field(min_length=1)] | None = None

    def unused(self) -> Iterable[str]:
        """The model's own family knows its tags and reads its calls."""
        return (name for name in ("think_tag", "tool_parser") if getattr(self, name))


def to_request(body: NativeBody, model: str) -> GenerateRequest:
    if body.stream:
        raise BadRequest(
            "/generate does not stream: send `stream: true` to /v1/chat/completions.",
            param="stream",
        )
    tools = body.with_added(tool.tool() for tool in body.tools or ())
    check_number(tools)
    param = body.tool_choice or "auto"
    choice = NamedTool(param.name) if isinstance(param, FunctionName) else param
    check_choice(choice, tools)
    choices = list(formats.of_response_format(body.response_format))
    constrained = formats.the_only_format(choices, otherwise="response_format")
    conversation = Conversation(
        tuple(messages(body.messages)),
        tools,
        response_format=formats.prompt_description(constrained["format"]),
        continue_final_message=body.continues(),
    )
    both, thinking, response = None, body.max_thinking_tokens, body.max_response_tokens
    if body.two_pass is False:
        if thinking is not None and response is None:
            raise BadRequest(
                "`two_pass: false` uses the sum of both limits: send `max_response_tokens` too.",
                param="max_thinking_tokens",
            )
        both = None if response is None else (thinking or 0) + response
        thinking = response = None
    return GenerateRequest(
        model=model,
        **body.shared_fields(),
        **constrained,
        max_tokens=both,
        thinking_budget=thinking,
        max_response_tokens=response,
        buffered=True,
        prompts=(conversation,),
        tool_choice=choice,
        param_names={"chat_template_kwargs.thinking_budget": "max_thinking_tokens"},
    )


class NativeOutput:
    def __init__(self, model: str) -> None:
        self._accumulator = Accumulator(model, prompts=1, n=1)
        self._pieces_before: dict[str, int] = {}
        """The number of text deltas before a call, by the call's id."""

    def add(self, event: Event) -> None:
        self._accumulator.add(event)
        if isinstance(event, ToolCallStarted):
            (answer,) = self._accumulator.answers
            self._pieces_before.setdefault(event.id, len(answer.texts))

    def body(self) -> Wire:
        (answer,) = self._accumulator.answers
        calls, errors = _checked(answer.calls)
        pieces = self._pieces_before[answer.calls[0].id] if answer.calls else None
        before = "".join(answer.texts[:pieces])
        after = "" if pieces is None else "".join(answer.texts[pieces:]).lstrip()
        return {
            "model": self._accumulator.model,
            "thinking": "".join(answer.reasoning),
            "response": before,
            "tool_calls": calls,
            "pre_tool_text": before if answer.calls else None,
            **({"post_tool_text": after} if after else {}),
            "finish_reason": "error" if errors and not calls else answer.finish_reason,
            **({"errors": errors} if errors else {}),
            "usage": self._accumulator.usage(),
            **self._accumulator.warnings(answer),
        }


def _checked(calls: list[ToolCall]) -> tuple[list[Wire], list[Wire]]:
    """The valid calls, and an error for each of the others."""
    good, errors = [], []
    for call in calls:
        named = {"id": call.id, "name": call.name}
        try:
            good.append({**named, "arguments": _arguments(call.arguments)})
        except BadRequest as refused:
            errors.append({**named, "message": refused.message})
    return good, errors


def _arguments(text: str) -> dict[str, Any]:
    raw = text.encode(errors="surrogatepass")
    if len(raw) > limits.NATIVE_ARGUMENTS_BYTES:
        raise BadRequest(
            f"The arguments have {len(raw)} bytes; the limit is "
            f"{limits.NATIVE_ARGUMENTS_BYTES >> 10} KiB."
        )
    try:
        return strict_json.parse_object(raw)
    except BadRequest as error:
        raise BadRequest(f"The arguments are not a JSON object: {error.message}") from None


PATH = "/generate"

router = keyed_router()


@router.post(PATH, openapi_extra=documented(PATH, NativeBody))
async def generate(http: Request) -> Response:
    body = await read(http, NativeBody)
    ignored = await in_thread_if_large(body.ignored)
    pool: Pool = http.app.state.pool
    model = await while_connected(http, model_or_default(pool, body.model))
    request = await in_thread_if_large(to_request, body, model)
    return await respond_buffered(http, request, NativeOutput(model), ignored=ignored)
