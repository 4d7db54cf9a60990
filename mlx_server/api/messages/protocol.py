"""`POST /v1/messages` and `/v1/messages/count_tokens` on the wire, as Anthropic documents them."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag

from mlx_server import limits
from mlx_server.api.content import Content, ForeignPart, OtherPart, as_parts, foreign_to
from mlx_server.api.fields import (
    EMPTY_IS_UNSET,
    UNKNOWN_ROLE,
    WHOLE,
    Arguments,
    Items,
    RoleName,
    SamplingBody,
    StopStrings,
    Text,
    ThinkingTokens,
    WireModel,
    by_type,
    role_of,
)
from mlx_server.api.histories import MENDED
from mlx_server.errors import BadRequest
from mlx_server.http.errors import NO_THREADS

Name = Annotated[str, Field(min_length=1)]

CACHE_CONTROL = frozenset({"cache_control"})
"""The field that marks a block for caching; one anywhere in a request counts (see
`has_cache_control`)."""


class CustomTool(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None


class AnthropicTool(WireModel):
    """A tool that runs at Anthropic, or whose schema only its models know. It is not offered."""

    type: Annotated[str, Field(min_length=1)]

    def ignored_as(self) -> str:
        return self.type


ToolParam = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[AnthropicTool, Tag("<anthropic>")],
    by_type("custom", otherwise="anthropic", untyped="custom"),
]


AnthropicEffort = Literal["low", "medium", "high", "xhigh", "max"]


class TextBlock(WireModel):
    ACCEPTED = CACHE_CONTROL | {"citations"}

    type: Literal["text"]
    text: Text = None


Texts = Annotated[
    str | Items[Annotated[TextBlock | OtherPart, Field(union_mode="left_to_right")]],
    BeforeValidator(as_parts),
]


class SearchResultBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["search_result"]
    title: Text = None
    source: Text = None
    content: Texts | None = None


class DocumentSource(WireModel):
    """A text, base64 of a text or a PDF file, parts, or a file elsewhere."""

    type: Text = None
    media_type: Text = None
    data: Text = None
    content: Content | None = None
    url: Text = None
    file_id: Text = None


class DocumentBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["document"]
    source: DocumentSource | None = None
    title: Text = None
    context: Text = None

    def unused(self) -> Iterable[str]:
        return () if self.source else ("source",)


class ToolReferenceBlock(WireModel):
    """Names a tool with `defer_loading`, which is offered from then on."""

    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_reference"]
    tool_name: Name


KnownResultBlock = Annotated[
    TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock, Field(discriminator="type")
]
ResultBlock = Annotated[
    KnownResultBlock | Annotated[ForeignPart, foreign_to(KnownResultBlock)],
    Field(union_mode="left_to_right"),
]


class ToolResultBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_result"]
    tool_use_id: Text = None
    content: Annotated[str | Items[ResultBlock] | None, BeforeValidator(as_parts)] = None
    is_error: Any = None


class ToolUseBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_use"]
    id: Text = None
    name: Text = None
    input: Arguments = None
    extra_content: dict[str, Any] | None = None
    """What an upstream sent with the call, such as Gemini's signature."""


class ThinkingBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["thinking"]
    thinking: Text = None
    signature: Text = None


KnownBlock = Annotated[
    TextBlock
    | SearchResultBlock
    | DocumentBlock
    | ToolReferenceBlock
    | ToolResultBlock
    | ToolUseBlock
    | ThinkingBlock,
    Field(discriminator="type"),
]
Block = Annotated[
    KnownBlock | Annotated[ForeignPart, foreign_to(KnownBlock)],
    Field(union_mode="left_to_right"),
]

SPEAKERS = ("user", "assistant", "system")


class AnthropicMessageParam(WireModel):
    role: RoleName = UNKNOWN_ROLE
    content: Annotated[str | Items[Block] | None, BeforeValidator(as_parts)] = None

    @property
    def speaker(self) -> Literal["user", "assistant", "system"]:
        match role_of(self.role):
            case "assistant":
                return "assistant"
            case "system" | "developer":
                return "system"
        return "user"

    def unused(self) -> Iterable[str]:
        if self.role not in SPEAKERS:
            yield "role"


class ToolChoiceParam(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def unused(self) -> Iterable[str]:
        if self.name and self.type != "tool":
            yield "name"


class AnthropicThinking(WireModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: ThinkingTokens | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    """"omitted": a thought comes back in its signature, for the next request, and not as text. With
    any other value the thought is sent as text, unabridged."""


class OutputFormat(WireModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WireModel):
    effort: Annotated[AnthropicEffort | None, EMPTY_IS_UNSET] = None
    format: OutputFormat | None = None


class PromptBody(SamplingBody):
    """A request whose tokens are counted. It may have all the fields of one that is answered."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        {
            *("metadata", "inference_geo", "user_profile_id", "workspace_id"),
            *("anthropic_version", "anthropic_beta"),
        }
    )
    model: Name
    messages: Annotated[Items[AnthropicMessageParam], Field(min_length=1), MENDED]
    system: Texts | None = None
    stop_sequences: Annotated[StopStrings | None, EMPTY_IS_UNSET] = None
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The name of `output_config.format` in Anthropic's first beta of it."""
    mcp_servers: Items[dict[str, Any]] | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def effort(self) -> str | None:
        return self.output_config.effort if self.output_config else None

    def stops(self) -> tuple[str, ...]:
        return (*(self.stop_sequences or ()), *super().stops())

    def ignored(self) -> list[str]:
        if (self.model_extra or {}).get("thread") is not None:
            raise BadRequest(
                "`thread` is not supported: this server keeps no messages. Send the whole "
                "conversation without it.",
                param="thread",
                code=NO_THREADS,
            )
        return super().ignored()

    def unused(self) -> Iterable[str]:
        if self.thinking and self.thinking.type == "disabled" and self.effort:
            yield "output_config.effort"


class MessagesBody(PromptBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **PromptBody.UNSUPPORTED,
        "compaction": "ask for a summary in a message",
    }

    max_tokens: Annotated[int, Field(ge=0), WHOLE]
    """0 computes the prompt for the prompt cache and answers nothing."""
    stream: bool | None = None
