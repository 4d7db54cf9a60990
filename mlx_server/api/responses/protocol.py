"""`POST /v1/responses` on the wire, as OpenAI and Open Responses document it."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_server import limits
from mlx_server.api import formats
from mlx_server.api.fields import Effort, Items, ResponseTokens, SamplingBody, WireModel
from mlx_server.api.formats import FormatChoice, JsonObjectFormat, StructuredOutputs, TextFormat
from mlx_server.api.responses.items import InputItem
from mlx_server.api.responses.tool_table import without_use
from mlx_server.api.responses.tools import Choice, ToolParam
from mlx_server.api.thinking import ThinkingBody
from mlx_server.requests import JsonFormat

Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # these don't exist here, so including them changes nothing
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]

Label = Annotated[str, Field(max_length=limits.LABEL_CHARACTERS.value)]
MetadataKey = Annotated[str, Field(max_length=limits.METADATA_KEY_CHARACTERS.value)]
MetadataValue = Annotated[str, Field(max_length=limits.METADATA_VALUE_CHARACTERS.value)]
Metadata = Annotated[
    dict[MetadataKey, MetadataValue],
    Field(max_length=limits.METADATA.value),
]


class JsonSchemaFormat(WireModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARACTERS.value)] | None = None
    description: str | None = None
    strict: bool | None = None


class Text(WireModel):
    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(WireModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(WireModel):
    include_obfuscation: bool | None = None
    """Accepted without effect."""
    include_progress: bool | None = None


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
    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        {"prompt_cache_retention", "prompt_cache_options", "client_metadata"}
    )

    model: Annotated[str, Field(min_length=1)]
    input: str | Items[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1)] | None = None
    conversation: Annotated[str, Field(min_length=1)] | ConversationParam | None = None

    tools: Annotated[Items[ToolParam], Field(max_length=limits.RESPONSE_TOOLS.value)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1, lt=2**53)] | None = None

    max_output_tokens: Annotated[int, Field(ge=1, lt=2**53)] | None = None
    max_response_tokens: ResponseTokens | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    structured_outputs: StructuredOutputs | None = None
    truncation: Literal["auto", "disabled"] | None = None

    include: Items[Include] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS.value)] | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    enable_response_messages: bool | None = None
    """vLLM's field: whether Harmony's own messages are returned in addition to items."""
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
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
        given = self.reasoning
        return (given.summary or given.generate_summary) if given else None

    @property
    def interprets(self) -> bool:
        """Whether the client listed a code interpreter among its tools."""
        return any(tool.type == "code_interpreter" for tool in self.tools or ())

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to report for each token; None for no log probabilities."""
        wanted = "message.output_text.logprobs" in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if wanted else None

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationParam) else given

    def constrained(self) -> FormatChoice:
        found = [*self._of_text(), *formats.of_structured_outputs(self.structured_outputs)]
        return formats.the_only_format(found, otherwise="text.format")

    def ignored(self) -> list[str]:
        unknown = formats.unknown_in(self.structured_outputs)
        return [*super().ignored(), *unknown, *dict.fromkeys(self._without_use())]

    def _of_text(self) -> Iterator[FormatChoice]:
        match self.text and self.text.format:
            case JsonObjectFormat():
                yield {"format": JsonFormat(), "format_param": "text.format"}
            case JsonSchemaFormat() as given:
                json = JsonFormat(given.schema_, bool(given.strict), given.name, given.description)
                yield {"format": json, "format_param": "text.format.schema"}

    def _without_use(self) -> Iterator[str]:
        if self.text and self.text.verbosity in ("low", "high"):
            yield "text.verbosity"
        yield from (f"tools.{kind}" for kind in without_use(self.tools or ()))
