"""`POST /v1/responses` on the wire, as OpenAI and Open Responses document it, and a new response,
which repeats its request."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from mlx_server import limits
from mlx_server.api import formats
from mlx_server.api.fields import (
    EMPTY_IS_UNSET,
    USUAL_VERBOSITY,
    WHOLE,
    Effort,
    Items,
    OtherTool,
    ResponseTokens,
    SamplingBody,
    StreamOptions,
    ThinkingBody,
    Verbosity,
    WireModel,
)
from mlx_server.api.formats import (
    FormatChoice,
    JsonObjectFormat,
    JsonSchemaParam,
    StructuredOutputs,
    TextFormat,
)
from mlx_server.api.histories import MENDED
from mlx_server.api.responses.items import InputItem, Wire
from mlx_server.api.responses.tools import (
    Choice,
    FreeformTool,
    FunctionTool,
    McpTool,
    NamespacedTool,
    ToolNamespace,
    ToolParam,
    ToolSearchTool,
    deferred_in_vain,
)

NotHere = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]

Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"] | NotHere
NOT_HERE = get_args(NotHere)
"""Fields that no item has here, so that including them changes nothing."""

Label = Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)]
MetadataKey = Annotated[str, Field(max_length=limits.METADATA_KEY_CHARACTERS)]
MetadataValue = Annotated[str, Field(max_length=limits.METADATA_VALUE_CHARACTERS)]
Metadata = Annotated[
    dict[MetadataKey, MetadataValue],
    Field(max_length=limits.METADATA),
]


class JsonSchemaTextFormat(JsonSchemaParam):
    type: Literal["json_schema"]


class Text(WireModel):
    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaTextFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Verbosity | None = None

    def unused(self) -> Iterable[str]:
        if self.verbosity not in (None, USUAL_VERBOSITY):
            yield "verbosity"


class Reasoning(WireModel):
    effort: Effort = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ConversationParam(WireModel):
    id: Annotated[str, Field(min_length=1)]


class ResponsesBody(SamplingBody, ThinkingBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **SamplingBody.UNSUPPORTED,
        "prompt": "this server stores no prompts",
        "messages": "send `input` instead",
        "max_tokens": "send `max_output_tokens` instead",
        "max_completion_tokens": "send `max_output_tokens` instead",
        "response_format": "send `text.format` instead",
        "reasoning_effort": "send `reasoning.effort` instead",
        "n": "a response has one answer",
    }
    ACCEPTED: ClassVar[frozenset[str]] = frozenset({"client_metadata"})

    model: Annotated[str, Field(min_length=1)]
    input: str | Annotated[Items[InputItem], MENDED] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str | None, EMPTY_IS_UNSET] = None
    conversation: Annotated[str | ConversationParam | None, EMPTY_IS_UNSET] = None

    tools: Annotated[Items[ToolParam], Field(max_length=limits.RESPONSE_TOOLS)] | None = None
    tool_choice: Annotated[Choice | None, EMPTY_IS_UNSET] = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1, lt=2**53), WHOLE] | None = None

    max_output_tokens: Annotated[int, Field(ge=1, lt=2**53), WHOLE] | None = None
    max_response_tokens: ResponseTokens | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    structured_outputs: StructuredOutputs | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, EMPTY_IS_UNSET] = None

    include: Items[Include] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS), WHOLE] | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None
    user: Label | None = None

    @property
    def include_progress(self) -> bool:
        """Never in the background, where every event stays in memory until the response ends."""
        option = self.stream_options and self.stream_options.include_progress
        return bool(self.stream and option and not self.background)

    @property
    def encrypts(self) -> bool:
        """Whether reasoning comes with an encoded copy for the client to send back."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def summary(self) -> str | None:
        """The kind of summary in which the client wants the reasoning too."""
        reasoning = self.reasoning
        return (reasoning.summary or reasoning.generate_summary) if reasoning else None

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to report for each token; None for no log probabilities."""
        is_included = "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if is_included or self.top_logprobs else None

    @property
    def conversation_id(self) -> str | None:
        conversation = self.conversation
        return conversation.id if isinstance(conversation, ConversationParam) else conversation

    def constrained(self) -> FormatChoice:
        choices = [*self._of_text(), *formats.of_structured_outputs(self.structured_outputs)]
        return formats.the_only_format(choices, otherwise="text.format")

    def unused(self) -> Iterable[str]:
        yield from (f"include.{value}" for value in self.include or () if value in NOT_HERE)
        yield from deferred_in_vain(self.tools or ())

    def _of_text(self) -> Iterator[FormatChoice]:
        match self.text and self.text.format:
            case JsonObjectFormat() as format:
                yield formats.of_json_object(format, "text.format")
            case JsonSchemaTextFormat() as format:
                yield {"format": format.format(), "format_param": "text.format.schema"}


SOME_NAME = "answer"
"""The name of a schema for which the client sent none."""


def new_response(body: ResponsesBody, id: str, *, stored: bool) -> Wire:
    """A response with all fields that Open Responses requires, also unset ones. `text.verbosity`
    is left out if unset, since it may not be null."""
    choices, choice = body.choices(), body.tool_choice
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": body.model,
        "previous_response_id": body.previous_response_id,
        **({"conversation": {"id": body.conversation_id}} if body.conversation_id else {}),
        "instructions": body.instructions,
        "output": [],
        "tools": [_tool_wire(tool) for tool in body.tools or () if not isinstance(tool, OtherTool)],
        "tool_choice": choice.model_dump(exclude_none=True)
        if isinstance(choice, WireModel)
        else choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_tool_calls": body.max_tool_calls,
        "max_output_tokens": body.max_output_tokens,
        "reasoning": {
            "effort": body.effort,
            "summary": body.summary,
        },
        "text": _text_wire(body.text or Text()),
        "truncation": body.truncation or "disabled",
        "temperature": choices.get("temperature", 1.0),
        "top_p": choices.get("top_p", 1.0),
        "presence_penalty": choices.get("presence_penalty", 0.0),
        "frequency_penalty": choices.get("frequency_penalty", 0.0),
        "top_logprobs": body.top_logprobs or 0,
        "usage": None,
        "store": stored,
        "background": bool(body.background),
        "service_tier": "default",
        "metadata": body.metadata or {},
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        **({"user": body.user} if body.user else {}),
    }


def _tool_wire(tool: ToolParam | NamespacedTool) -> Wire:
    match tool:
        case FunctionTool():
            fields = tool.model_dump(include=ECHOED_FUNCTION_FIELDS) | {"strict": bool(tool.strict)}
            deferred = tool.defer_loading
            return fields if deferred is None else {**fields, "defer_loading": deferred}
        case ToolNamespace():
            nested = (each for each in tool.tools if not isinstance(each, OtherTool))
            return {
                "type": "namespace",
                "name": tool.name,
                "description": tool.description or "",
                "tools": [_tool_wire(each) for each in nested],
            }
        case FreeformTool() | ToolSearchTool():
            return tool.model_dump(exclude_none=True)
        case McpTool():  # headers and keys are left out: others may read the response
            return tool.model_dump(exclude_none=True, include=ECHOED_SERVER_FIELDS)
    return {}


ECHOED_FUNCTION_FIELDS = {"type", "name", "description", "parameters"}
ECHOED_SERVER_FIELDS = {
    "type",
    "server_label",
    "server_url",
    "server_description",
    "connector_id",
    "allowed_tools",
    "require_approval",
}


def _text_wire(text: Text) -> Wire:
    verbosity = {"verbosity": text.verbosity} if text.verbosity else {}
    match text.format:
        case JsonSchemaTextFormat() as format:
            schema = {
                "type": "json_schema",
                "name": format.name or SOME_NAME,
                "description": format.description,
                "schema": format.schema_,
                "strict": bool(format.strict),
            }
            return {"format": schema, **verbosity}
        case None:
            return {"format": {"type": "text"}, **verbosity}
        case format:
            return {"format": {"type": format.type}, **verbosity}
