"""Converts an embeddings body to an `EmbedRequest`."""

from collections.abc import Sequence

from mlx_server import limits
from mlx_server.api.embeddings.protocol import EmbeddingsBody
from mlx_server.errors import BadRequest
from mlx_server.generation.embeddings import EmbedRequest, Input


def to_request(body: EmbeddingsBody, client: str) -> EmbedRequest:
    return EmbedRequest(
        model=body.model,
        inputs=checked(inputs_of(body.input)),
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        truncate=bool(body.truncate),
        client=client,
    )


def inputs_of(
    given: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
) -> tuple[Input, ...]:
    """A list of token ids is one input; any other list is several."""
    if isinstance(given, str):
        return (given,)
    if ids := tuple(item for item in given if isinstance(item, int)):
        return (ids,)
    several = (item for item in given if not isinstance(item, int))
    return tuple(item if isinstance(item, str) else tuple(item) for item in several)


def checked(inputs: tuple[Input, ...]) -> tuple[Input, ...]:
    """Raises BadRequest for no inputs, or for too many."""
    most = limits.EMBEDDING_INPUTS
    if not 0 < len(inputs) <= most:
        raise BadRequest(
            f"`input` has {len(inputs)} inputs; it should have at least one and at most {most}.",
            param="input",
        )
    return inputs
