"""`/v1/conversations` on the wire, as OpenAI documents it."""

from typing import Annotated

from pydantic import Field

from mlx_server import limits
from mlx_server.api.fields import Items, WireModel
from mlx_server.api.responses.items import InputItem
from mlx_server.api.responses.protocol import Metadata

SomeItems = Annotated[Items[InputItem], Field(max_length=limits.ADDED_ITEMS)]


class ConversationBody(WireModel):
    items: SomeItems | None = None
    metadata: Metadata | None = None


class UpdateBody(WireModel):
    metadata: Metadata | None = None


class ItemsBody(WireModel):
    items: Annotated[SomeItems, Field(min_length=1)]
