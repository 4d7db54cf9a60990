"""The roles of messages on the wire, which other APIs and templates name in other ways."""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from mlx_server.messages import Role

ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}
"""`function` is the older name of `tool`, and `ipython` the name that Llama's templates use."""

UNKNOWN_ROLE: Final = "unknown"
"""The role of a message without one. It is reported as any unknown one is."""

RoleName = Annotated[str, Field(min_length=1, json_schema_extra={"examples": [*ROLES]})]


def role_of(name: str) -> Role:
    """The role of this name. A text of an unknown one is shown to the model as the user's."""
    return ROLES.get(name, "user")
