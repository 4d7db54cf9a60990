"""The settings of connectors: MCP servers that requests may use by name."""

import re
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    model_validator,
)

from mlx_server.config.frozen import FROZEN
from mlx_server.config.values import absolute

_NEEDED = {
    "args": "command",
    "env": "command",
    "headers": "url",
    "allow_private": "url",
    "oauth": "url",
    "login": "url",
}
"""The field that a connector needs if it has the field on the left."""


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


class LoginSettings(BaseModel):
    """The owner logs in with `mlx-server connectors login`. All of it may be left out where the
    authorization server registers clients by itself."""

    model_config = FROZEN

    issuer: Annotated[str, AfterValidator(_http_url)] | None = None
    """The authorization server that knows the client. No other one gets the secret."""
    client_id: Annotated[str, Field(min_length=1)] | None = None
    client_secret: SecretStr | None = None
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """The port on this machine to which the browser returns; 0 stands for any free port."""

    @model_validator(mode="after")
    def _of_a_client(self) -> Self:
        if self.client_secret and not (self.client_id and self.issuer):
            raise ValueError("`client_secret` needs a `client_id` and an `issuer`")
        return self


def _login(given: object) -> object:
    """`true` is short for one without settings."""
    return {} if given is True else given


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
    login: Annotated[LoginSettings | None, BeforeValidator(_login)] = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.url is None) == (self.command is None):
            raise ValueError("should have either a `url` or a `command`")
        if self.oauth and self.login:
            raise ValueError("should have either `oauth` or `login`")
        of_urls = ("headers", "allow_private", "oauth", "login")
        foreign = ("args", "env") if self.command is None else of_urls
        for name in foreign:
            if getattr(self, name):
                raise ValueError(f"`{name}` needs a `{_NEEDED[name]}`")
        return self
