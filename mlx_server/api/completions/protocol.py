"""`POST /v1/completions` on the wire, as OpenAI documents it."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from mlx_server import limits
from mlx_server.api.fields import GenerationBody, Items
from mlx_server.api.formats import ConstrainedBody

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Texts = Annotated[Items[str], Field(min_length=1, max_length=limits.PROMPTS)]
TokenLists = Annotated[Items[TokenIds], Field(min_length=1, max_length=limits.PROMPTS)]


class CompletionBody(ConstrainedBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **GenerationBody.UNSUPPORTED,
        "suffix": "these models can't insert text before a suffix",
    }

    prompt: str | TokenIds | Texts | TokenLists
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    """-1 stands for as many tokens as fit the context."""
    logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    skip_special_tokens: bool | None = None
    """vLLM's: if false, the text has the special tokens that the model wrote."""
