"""`POST /tokenize` and `POST /detokenize` on the wire, as vLLM and llama.cpp have them."""

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
"""Fields that have an effect on `messages`, and none on a `prompt`."""


OF_CONTENT = ("add_special", "parse_special", "with_pieces")
"""Fields that have an effect on a `content` only."""


class TokenizeBody(WireModel):
    """It has a `prompt` or `messages`, which are vLLM's, or a `content`, which is llama.cpp's."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """The first model of models.yaml by default."""
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    """Whether the tokens that begin and end a text are added; by default they are not."""
    parse_special: bool | None = None
    """Whether names of special tokens in the text are those tokens; by default they are."""
    with_pieces: bool | None = None
    messages: Annotated[Items[MessageParam], Field(min_length=1)] | None = None
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS)] | None = None
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
        of_chat = OF_CHAT if self.messages is None else ()
        of_content = OF_CONTENT if self.content is None else ("add_special_tokens",)
        for name in (*of_chat, *of_content):
            if getattr(self, name) is not None:
                yield name


class DetokenizeBody(WireModel):
    model: Annotated[str, Field(min_length=1)] | None = None
    tokens: Annotated[Items[TokenId], Field(max_length=limits.TOKENIZED)]
