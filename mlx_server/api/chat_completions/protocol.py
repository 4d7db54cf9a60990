"""`POST /v1/chat/completions` on the wire, as OpenAI documents it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_server.api.fields import MAX_TOP_LOGPROBS, GenerationBody, Items, WireModel


class TextPart(WireModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(WireModel):
    type: Literal["refusal"]
    refusal: str


class MediaPart(WireModel):
    """Known, and refused by name: these models read text."""

    type: Literal["image_url", "input_audio", "file"]


Part = Annotated[TextPart | RefusalPart | MediaPart, Field(discriminator="type")]
Content = str | Items[Part]


class FunctionCall(WireModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] = ""


class ToolCallParam(WireModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class MessageParam(WireModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Items[ToolCallParam] | None = None
    tool_call_id: str | None = None


class FunctionParam(WireModel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(WireModel):
    type: Literal["function"]
    function: FunctionParam


class ResponseFormat(WireModel):
    type: str


class ChatBody(GenerationBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **GenerationBody.UNSUPPORTED,
        "functions": "send `tools` instead",
        "function_call": "send `tool_choice` instead",
        "audio": "these models answer in text",
        "prediction": "predicted outputs are not supported",
        "web_search_options": "there is no web search here",
    }
    ACCEPTED: ClassVar[frozenset[str]] = GenerationBody.ACCEPTED | {"prompt_cache_key"}

    messages: Annotated[Items[MessageParam], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[Items[ToolParam], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: Items[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
