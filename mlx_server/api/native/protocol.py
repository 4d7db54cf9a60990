"""`POST /generate` on the wire: thinking and answer in separate fields, with separate limits."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_server import limits
from mlx_server.api.chat_completions.protocol import FunctionName, MessageParam
from mlx_server.api.continuation import ContinuationBody
from mlx_server.api.fields import Items, ResponseTokens, SamplingBody, ThinkingTokens, WireModel
from mlx_server.api.formats import ResponseFormat

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

    messages: Annotated[Items[MessageParam], Field(min_length=1)]
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
