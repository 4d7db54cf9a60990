"""`POST /v1/messages` and `/v1/messages/count_tokens` on the wire, as Anthropic documents them."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_server import limits
from mlx_server.api.fields import WHOLE, Items, SamplingBody, StopStrings, ThinkingTokens, WireModel
from mlx_server.api.messages.blocks import AnthropicEffort, AnthropicMessageParam, Texts
from mlx_server.api.messages.errors import NO_THREADS
from mlx_server.api.messages.tool_params import Name, ToolParam
from mlx_server.errors import BadRequest


class ToolChoiceParam(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def unused(self) -> Iterable[str]:
        if self.name and self.type != "tool":
            yield "name"


class AnthropicThinking(WireModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    """"between_tools": the model thinks about results of tools, and not before its first call."""
    budget_tokens: ThinkingTokens | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    """"omitted": a thought comes back in its signature, for the next request, and not as text. With
    any other value the thought is sent as text, unabridged."""


class OutputFormat(WireModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WireModel):
    effort: AnthropicEffort | None = None
    format: OutputFormat | None = None


class CompactionConfig(WireModel):
    """Asks for a summary of the conversation in place of an answer."""

    type: Literal["summarize"]
    instructions: str | None = None


class PromptBody(SamplingBody):
    """A request whose tokens are counted. It may have all the fields of one that is answered."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        {
            *("metadata", "service_tier", "inference_geo", "user_profile_id", "workspace_id"),
            *("anthropic_version", "anthropic_beta"),
        }
    )
    model: Name
    messages: Annotated[Items[AnthropicMessageParam], Field(min_length=1)]
    system: Texts | None = None
    stop_sequences: StopStrings | None = None
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
    compaction: CompactionConfig | None = None
    max_tokens: Annotated[int, Field(ge=0), WHOLE]
    """0 computes the prompt for the prompt cache and answers nothing."""
    stream: bool | None = None

    def ignored(self) -> list[str]:
        if self.compaction and (self.model_extra or {}).get("context_management"):
            raise BadRequest(
                "`compaction` and `context_management` exclude each other: send one of them.",
                param="compaction",
            )
        return super().ignored()
