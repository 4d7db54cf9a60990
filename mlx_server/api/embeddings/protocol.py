"""`POST /v1/embeddings` on the wire, as OpenAI documents it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mlx_server.api.completions.protocol import TokenId
from mlx_server.api.fields import Items, WireModel

Ids = Items[TokenId]
Dimensions = Annotated[int, Field(ge=1, lt=2**31)]


class EmbeddingsBody(WireModel):
    ACCEPTED: ClassVar[frozenset[str]] = frozenset({"user"})

    model: Annotated[str, Field(min_length=1)]
    input: str | Ids | Items[str] | Items[Ids]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    prompt_name: str | None = None
    """Names the prompt of the model's files that is put before each input, as in Text Embeddings
    Inference."""
    truncate: bool | None = None
    """Whether inputs that are too long are cut, as in Text Embeddings Inference; else they are
    refused."""
