"""The tools of `POST /v1/messages` on the wire, as Anthropic documents them."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlx_server.api.fields import WireModel

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
