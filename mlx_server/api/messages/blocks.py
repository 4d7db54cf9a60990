"""The content blocks of `POST /v1/messages` on the wire, as Anthropic documents them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_server.api.fields import Items, WireModel

Name = Annotated[str, Field(min_length=1)]

CACHE_CONTROL = frozenset({"cache_control"})
"""The field that marks a block for caching; one anywhere in a request counts (see
`has_cache_control`)."""


class TextBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["text"]
    text: str


class ImageBlock(WireModel):
    """Refused by name: these models read only text."""

    type: Literal["image"]


class SearchResultBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["search_result"]
    title: str
    source: str
    content: Items[TextBlock]


class TextSource(WireModel):
    ACCEPTED: ClassVar[frozenset[str]] = frozenset({"media_type"})  # it is always text/plain

    type: Literal["text"]
    data: str


class ContentSource(WireModel):
    type: Literal["content"]
    content: str | Items[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]]


class FileSource(WireModel):
    """Refused by name: this server keeps no files and fetches none."""

    type: Literal["url", "file"]


class DataSource(WireModel):
    """A PDF file, or text."""

    type: Literal["base64"]
    media_type: str
    data: str


class DocumentBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["document"]
    source: Annotated[
        TextSource | ContentSource | DataSource | FileSource, Field(discriminator="type")
    ]
    title: str | None = None
    context: str | None = None


class ToolReferenceBlock(WireModel):
    """Names a tool with `defer_loading`, which is offered from then on."""

    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_reference"]
    tool_name: Name


ResultBlock = Annotated[
    TextBlock | ImageBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]


class ToolResultBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Items[ResultBlock] | None = None
    is_error: bool | None = None


class ToolUseBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ThinkingBlock(WireModel):
    ACCEPTED = CACHE_CONTROL

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(WireModel):
    """A thought that only the server that sent it can read."""

    type: Literal["redacted_thinking"]
    data: str

    def ignored_as(self) -> str:
        return self.type


class CompactionBlock(WireModel):
    """Stands for what was said before it."""

    ACCEPTED = CACHE_CONTROL

    type: Literal["compaction"]
    content: str | None = None


class ToolReferences(WireModel):
    """The tools that Anthropic's tool search found; empty if it failed."""

    tool_references: Items[ToolReferenceBlock] | None = None


class ToolSearchBlock(WireModel):
    type: Literal["tool_search_tool_result"]
    content: ToolReferences


class HostedBlock(WireModel):
    """A call or a result of Anthropic's own tools earlier in the conversation. It is left out and
    reported."""

    type: Literal[
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
        "tool_addition",
        "tool_removal",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]

    def ignored_as(self) -> str:
        return self.type


Block = Annotated[
    TextBlock
    | ImageBlock
    | SearchResultBlock
    | DocumentBlock
    | ToolReferenceBlock
    | ToolResultBlock
    | ToolUseBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | CompactionBlock
    | ToolSearchBlock
    | HostedBlock,
    Field(discriminator="type"),
]

Texts = str | Items[TextBlock]


class AnthropicMessageParam(WireModel):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]
    clear_at: Literal["next_user_message", "never"] | None = None
    """Says until when a system message is part of the prompt."""
