"""Errors as Ollama writes them, on all of its routes."""

from typing import Any

from starlette.types import Scope

from mlx_server.api.overflow import messages_too_long
from mlx_server.errors import ContextTooLong, ServerError
from mlx_server.generation.plan import PromptOverflow

PREFIX = "/api/"

REFUSED = frozenset(f"{PREFIX}{name}" for name in ("copy", "create", "delete", "pull", "push"))
"""Routes that only say why they do nothing."""


def is_ollama(scope: Scope) -> bool:
    path: str = scope.get("path", "")
    return path.startswith(PREFIX)


def error_body(error: ServerError) -> dict[str, Any]:
    return {"error": error.body()["error"]["message"]}


def prompt_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    """The overflow in Ollama's words, by which its clients know that they have to shorten, with the
    numbers that it leaves out."""
    numbers = messages_too_long(overflow, tokens)
    return ContextTooLong(
        "the prompt is longer than the context length currently available to the model. "
        f"{numbers.message}",
        param=numbers.param,
    )


def input_too_long(error: ContextTooLong) -> ContextTooLong:
    """The same for a text to embed."""
    return ContextTooLong(
        f"the input length exceeds the context length. {error.message}", param=error.param
    )
