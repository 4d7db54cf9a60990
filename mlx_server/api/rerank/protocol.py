"""`POST /v1/rerank` on the wire, as Jina and Cohere document it."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from mlx_server import limits
from mlx_server.api.fields import Items, WireModel


class RankedDocument(WireModel):
    text: str


def _object_of(given: Any) -> Any:
    if isinstance(given, str):
        return {"text": given}
    if not isinstance(given, dict):
        raise ValueError("should be a string, or an object with `text`")
    return given


TextOrDocument = Annotated[
    RankedDocument, BeforeValidator(_object_of, json_schema_input_type=str | RankedDocument)
]


class RerankBody(WireModel):
    ACCEPTED: ClassVar[frozenset[str]] = frozenset({"user"})

    model: Annotated[str, Field(min_length=1)]
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        Items[TextOrDocument],
        Field(min_length=1, max_length=limits.EMBEDDING_INPUTS),
    ]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    """Tells the model what makes a document relevant; by default, that it answers a web search."""
