"""Authorization of connectors by OAuth's client credentials, with the SDK's own client."""

from dataclasses import dataclass, field

from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from mlx_server.mcp.connectors import ClientCredentials


@dataclass
class RememberedToken:
    """The token of one connector, until the server ends: a new one costs only a request."""

    token: OAuthToken | None = field(default=None, repr=False)

    async def get_tokens(self) -> OAuthToken | None:
        return self.token

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.token = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return None  # the owner has registered the client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        pass


_tokens: dict[tuple[str, ClientCredentials], RememberedToken] = {}
"""One for each connector of models.yaml, so no client can add to them. A token is for one server:
others that the owner has registered with the same credentials never get it."""


def authorization(url: str, credentials: ClientCredentials) -> ClientCredentialsOAuthProvider:
    """Asks for a token when the server refuses a request without one, or with an old one."""
    return ClientCredentialsOAuthProvider(
        url,
        _tokens.setdefault((url, credentials), RememberedToken()),
        credentials.client_id,
        credentials.client_secret,
        issuer=credentials.issuer,
    )
