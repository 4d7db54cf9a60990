"""`POST /tokenize` and `POST /detokenize` on the wire, as vLLM has them."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from mlx_server import limits
from mlx_server.api.chat_completions.protocol import MessageParam, ToolParam
from mlx_server.api.completions.protocol import TokenId
from mlx_server.api.fields import Items, WireModel

OF_CHAT = (
    *("tools", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Fields that say something of `messages`, and nothing of a `prompt`."""


class TokenizeBody(WireModel):
    """It has either a `prompt` or `messages`."""

    model: Annotated[str, Field(min_length=1)]
    prompt: str | None = None
    messages: Annotated[Items[MessageParam], Field(min_length=1)] | None = None
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS.value)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    """If false, the prompt ends with the final message."""
    continue_final_message: bool | None = None
    """If true, it ends within the last message, which an answer continues."""
    add_special_tokens: bool | None = None
    """Defaults to true for a `prompt` and to false for `messages`, whose template adds its own."""
    return_token_strs: bool | None = None

    def unused(self) -> Iterable[str]:
        if self.prompt is not None:
            yield from (name for name in OF_CHAT if getattr(self, name) is not None)


class DetokenizeBody(WireModel):
    model: Annotated[str, Field(min_length=1)]
    tokens: Annotated[Items[TokenId], Field(max_length=limits.TOKENIZED.value)]
