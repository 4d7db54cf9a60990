"""Asks a running server for the facts that a client's settings need."""

import httpx

from mlx_server.clients.chat import checked_url, client_of, model_facts, served_models
from mlx_server.clients.connect.template import Connection
from mlx_server.errors import BadRequest, SettingsError

NO_KEY = "none"
"""The key in the settings for a server that needs none, since most clients refuse an empty key."""


def connection_to(url: str, key: str, model: str | None, context: int | None) -> Connection:
    """The connection for a client's settings. A model or context length that is not given is
    requested from the server.

    Raises ServerError if `url` is no URL, if no server answers, or if it does not know the model or
    its context length.
    """
    base = url.rstrip("/").removesuffix("/v1")
    checked_url(base)
    if model is None or context is None:
        with client_of(base, key) as client:
            model = model or _default_model(served_models(client))
            context = context or _context_of(client, model)
    return Connection(base, key or NO_KEY, model, context)


def _default_model(models: list[str]) -> str:
    if not models:
        raise SettingsError("That server has no models. List one in models.yaml.")
    return models[0]


def _context_of(client: httpx.Client, model: str) -> int:
    try:
        context = model_facts(client, model).get("context_length")
    except BadRequest as error:
        raise SettingsError(error.message) from None
    if type(context) is not int:
        raise SettingsError(
            f"That server does not know yet how long the context of {model} is. Set it with "
            "--context-length, or send the model a request first."
        )
    return context
