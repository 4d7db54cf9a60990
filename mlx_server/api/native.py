"""`POST /generate` on the wire: thinking and answer in separate fields, with separate limits."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from fastapi import APIRouter, Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api import formats
from mlx_server.api.accumulator import Accumulator
from mlx_server.api.chat_completions.input import FunctionName, MessageParam, messages
from mlx_server.api.fields import (
    ContinuationBody,
    Items,
    ResponseTokens,
    SamplingBody,
    ThinkingTokens,
    WireModel,
    check_choice,
)
from mlx_server.api.formats import ResponseFormat
from mlx_server.api.handlers import documented, read, respond_buffered, while_connected
from mlx_server.api.histories import MENDED
from mlx_server.api.models import model_or_default
from mlx_server.errors import BadRequest
from mlx_server.events import Event, ToolCallStarted
from mlx_server.families.base import ModelFamily
from mlx_server.families.table import rows
from mlx_server.http import strict_json
from mlx_server.messages import Conversation, Tool, ToolCall
from mlx_server.parsers.parse_context import NAMES
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest, NamedTool, ToolChoice

ELSEWHERE = "use /v1/chat/completions"


class NativeTool(WireModel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NativeBody(SamplingBody, ContinuationBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **SamplingBody.UNSUPPORTED,
        "n": ELSEWHERE,
        "structured_outputs": ELSEWHERE,
    }

    messages: Annotated[Items[MessageParam], Field(min_length=1), MENDED]
    model: Annotated[str, Field(min_length=1)] | None = None
    """The first model of models.yaml by default."""
    stream: bool | None = None
    two_pass: bool | None = None
    """False: thinking and answer share one limit, the sum of both."""
    think_tag: Annotated[str, Field(min_length=1)] | None = None
    max_thinking_tokens: ThinkingTokens | None = None
    max_response_tokens: ResponseTokens | None = None
    tools: Annotated[Items[NativeTool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionName | None = None
    response_format: ResponseFormat | None = None
    tool_parser: Annotated[str, Field(min_length=1)] | None = None


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


Wire = dict[str, Any]


class _InvalidCall(Exception):
    """A call whose arguments can't be used."""


class NativeOutput:
    def __init__(self, *, model: str) -> None:
        self._accumulator = Accumulator(model=model, prompts=1, n=1)
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
        except _InvalidCall as refused:
            errors.append({**named, "message": str(refused)})
    return good, errors


def _arguments(text: str) -> dict[str, Any]:
    raw = text.encode(errors="surrogatepass")
    if len(raw) > limits.NATIVE_ARGUMENTS_BYTES:
        raise _InvalidCall(
            f"The arguments have {len(raw)} bytes; the limit is "
            f"{limits.NATIVE_ARGUMENTS_BYTES >> 10} KiB."
        )
    try:
        return strict_json.parse_object(raw)
    except BadRequest as error:
        raise _InvalidCall(f"The arguments are not a JSON object: {error.message}") from None


PATH = "/generate"

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, NativeBody))
async def generate(http: Request) -> Response:
    body = await read(http, NativeBody)
    ignored = await in_thread(body.ignored)
    pool: Pool = http.app.state.pool
    model = await while_connected(http, model_or_default(pool, body.model))
    family = await while_connected(http, _family(pool, model))
    request = await in_thread(to_request, body, model, family)
    return await respond_buffered(http, request, NativeOutput(model=model), ignored=ignored)


async def _family(pool: Pool, model: str) -> ModelFamily:
    with pool.row_slots.take(1):
        return await pool.family(pool.models.split(model)[0])
