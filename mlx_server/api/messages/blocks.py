"""The content blocks of `POST /v1/messages` on the wire, as Anthropic documents them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_server.api.fields import Items, WireModel
from mlx_server.api.messages.tool_params import CACHE_CONTROL, Name, ToolParam

AnthropicEffort = Literal["low", "medium", "high", "xhigh", "max"]


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
    extra_content: dict[str, Any] | None = None
    """What an upstream sent with the call, such as Gemini's signature."""


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


class NamedToolChange(WireModel):
    type: Literal["tool_reference"]
    name: Name


class McpToolChange(WireModel):
    """Refused by name: `mcp_servers` is not supported."""

    type: Literal["mcp_tool_reference", "mcp_toolset_reference"]


class ToolDefinition(WireModel):
    """A tool that is not among the `tools` of the body."""

    type: Literal["tool_definition"]
    definition: ToolParam


class ToolAdditionBlock(WireModel):
    """The tool is offered from here on."""

    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_addition"]
    tool: Annotated[NamedToolChange | McpToolChange | ToolDefinition, Field(discriminator="type")]


class ToolRemovalBlock(WireModel):
    """The tool is no longer offered from here on."""

    ACCEPTED = CACHE_CONTROL

    type: Literal["tool_removal"]
    tool: Annotated[NamedToolChange | McpToolChange, Field(discriminator="type")]


ToolChange = Annotated[ToolAdditionBlock | ToolRemovalBlock, Field(discriminator="type")]


class CompactionBlock(WireModel):
    """Stands for what was said before it."""

    ACCEPTED = CACHE_CONTROL | {"encrypted_content", "signature"}

    type: Literal["compaction"]
    content: str | None = None
    tool_changes: Items[ToolChange] | None = None
    """The tool changes in the messages that the block stands for."""


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
    | ToolAdditionBlock
    | ToolRemovalBlock
    | HostedBlock,
    Field(discriminator="type"),
]

Texts = str | Items[TextBlock]


class MessageOutputConfig(WireModel):
    effort: AnthropicEffort | None = None


class AnthropicMessageParam(WireModel):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block] | None = None
    """Missing only from a system message that sets the effort."""
    output_config: MessageOutputConfig | None = None
    """Of a system message: how later turns are answered."""
    clear_at: Literal["next_user_message", "never"] | None = None
    """Says until when a system message is part of the prompt."""
