"""The settings of connectors: MCP servers that requests may use by name."""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, Field, SecretStr, ValidationInfo, model_validator

from mlx_server.config.frozen import FROZEN
from mlx_server.config.values import absolute

_NEEDED = {
    "args": "command",
    "env": "command",
    "headers": "url",
    "allow_private": "url",
    "oauth": "url",
}
"""What else a connector with a setting needs."""


def _program(command: str, info: ValidationInfo) -> str:
    return absolute(command, info) if "/" in command else command


def _http_url(url: str) -> str:
    if re.fullmatch(r"https?://[!-~]+", url):
        return url
    raise ValueError("should be an http or https URL")


class OAuthSettings(BaseModel):
    """OAuth's client credentials, with which a connector gets its tokens."""

    model_config = FROZEN

    issuer: Annotated[str, AfterValidator(_http_url)]
    """The authorization server that knows the client. No other one gets the secret."""
    client_id: Annotated[str, Field(min_length=1)]
    client_secret: SecretStr


class ConnectorSettings(BaseModel):
    """An MCP server that requests can use: a URL, or a program that is started."""

    model_config = FROZEN

    url: Annotated[str, AfterValidator(_http_url)] | None = None
    command: Annotated[str, Field(min_length=1), AfterValidator(_program)] | None = None
    """A path, or a name that is looked up in PATH."""
    args: tuple[str, ...] = ()
    env: dict[str, SecretStr] = {}
    headers: dict[str, SecretStr] = {}
    allow_private: bool = False
    """Whether the URL may be on this machine or its network."""
    oauth: OAuthSettings | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.url is None) == (self.command is None):
            raise ValueError("should have either a `url` or a `command`")
        foreign = ("args", "env") if self.command is None else ("headers", "allow_private", "oauth")
        for name in foreign:
            if getattr(self, name):
                raise ValueError(f"`{name}` needs a `{_NEEDED[name]}`")
        return self
