"""`POST /v1/messages` and `/v1/messages/count_tokens` on the wire, as Anthropic documents them."""

from collections.abc import Container, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from mlx_server import limits
from mlx_server.api.content import OtherPart, as_parts, kind_of
from mlx_server.api.fields import (
    EMPTY_IS_UNSET,
    REPORTED_ELSEWHERE,
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


def _kind(value: Any) -> str:
    """A union tag that is no field name, so that errors show only field names."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<custom>" if kind in (None, "custom") else "<anthropic>"


ToolParam = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[AnthropicTool, Tag("<anthropic>")],
    Discriminator(_kind),
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


class MediaBlock(WireModel):
    """An image, a sound or a video, in any form."""

    type: str

    def ignored_as(self) -> str:
        return REPORTED_ELSEWHERE


class SearchResultBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["search_result"]
    title: Text = None
    source: Text = None
    content: Texts | None = None


class TextSource(WireModel):
    ACCEPTED: ClassVar[frozenset[str]] = frozenset({"media_type"})  # it is always text/plain

    type: Literal["text"]
    data: Text = None


class FileSource(WireModel):
    """A file elsewhere: this server keeps no files and fetches none."""

    type: str
    url: Any = None
    file_id: Any = None


class DataSource(WireModel):
    """A PDF file, or text."""

    type: Literal["base64"]
    media_type: Text = None
    data: Text = None


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _kind_of_block(known: Container[str], value: Any) -> str:
    """A union tag that is no field name, so that errors show only field names. A block of a known
    type is wrong, or it would not come here, and gets no tag."""
    kind = _type_of(value)
    if not isinstance(kind, str) or kind in known:
        return ""
    return "<media>" if kind_of(kind) else "<other>"


def _kind_of_content(value: Any) -> str:
    return _kind_of_block(("text",), value)


def _kind_of_source(value: Any) -> str:
    return "<known>" if _type_of(value) in ("text", "content", "base64", None) else "<file>"


Other = Annotated[MediaBlock, Tag("<media>")] | Annotated[OtherPart, Tag("<other>")]


class ContentSource(WireModel):
    type: Literal["content"]
    content: Annotated[
        str
        | Items[
            Annotated[
                TextBlock | Annotated[Other, Discriminator(_kind_of_content)],
                Field(union_mode="left_to_right"),
            ]
        ],
        BeforeValidator(as_parts),
    ]


KnownSource = Annotated[TextSource | ContentSource | DataSource, Field(discriminator="type")]
Source = Annotated[
    Annotated[KnownSource, Tag("<known>")] | Annotated[FileSource, Tag("<file>")],
    Discriminator(_kind_of_source),
]


class DocumentBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["document"]
    source: Source | None = None
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
RESULT_TYPES = frozenset({"text", "search_result", "document", "tool_reference"})


def _kind_of_result(value: Any) -> str:
    return _kind_of_block(RESULT_TYPES, value)


ResultBlock = Annotated[
    KnownResultBlock | Annotated[Other, Discriminator(_kind_of_result)],
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


class RedactedThinkingBlock(WireModel):
    """A thought that only the server that sent it can read."""

    type: Literal["redacted_thinking"]
    data: Text = None

    def ignored_as(self) -> str:
        return self.type


class ToolReferences(WireModel):
    """The tools that Anthropic's tool search found; empty if it failed."""

    tool_references: Items[ToolReferenceBlock] | None = None


class ToolSearchBlock(WireModel):
    type: Literal["tool_search_tool_result"]
    content: ToolReferences


Hosted = Literal[
    "advisor_tool_result",
    "bash_code_execution_tool_result",
    "code_execution_tool_result",
    "container_upload",
    "fallback",
    "mcp_tool_listing",
    "mcp_tool_result",
    "mcp_tool_use",
    "server_tool_use",
    "text_editor_code_execution_tool_result",
    "web_fetch_tool_result",
    "web_search_tool_result",
]


class HostedBlock(WireModel):
    """A call or a result of Anthropic's own tools earlier in the conversation. It is left out and
    reported."""

    type: Hosted

    def ignored_as(self) -> str:
        return self.type


KnownBlock = Annotated[
    TextBlock
    | SearchResultBlock
    | DocumentBlock
    | ToolReferenceBlock
    | ToolResultBlock
    | ToolUseBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolSearchBlock
    | HostedBlock,
    Field(discriminator="type"),
]
HOSTED = frozenset(get_args(Hosted))
BLOCK_TYPES = RESULT_TYPES | HOSTED
BLOCK_TYPES |= {"tool_result", "tool_use", "thinking", "redacted_thinking"}
BLOCK_TYPES |= {"tool_search_tool_result"}


def _kind_of_any(value: Any) -> str:
    return _kind_of_block(BLOCK_TYPES, value)


Block = Annotated[
    KnownBlock | Annotated[Other, Discriminator(_kind_of_any)],
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
            *("metadata", "service_tier", "inference_geo", "user_profile_id", "workspace_id"),
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


class MessagesBody(PromptBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **PromptBody.UNSUPPORTED,
        "compaction": "ask for a summary in a message",
    }

    max_tokens: Annotated[int, Field(ge=0), WHOLE]
    """0 computes the prompt for the prompt cache and answers nothing."""
    stream: bool | None = None
