"""`POST /v1/embeddings` on the wire, as OpenAI documents it."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.completions import Ids
from mlx_server.api.fields import WHOLE, Items, WireModel, ignored_header
from mlx_server.api.handlers import (
    documented,
    in_pieces,
    json_pieces,
    read,
    while_connected,
)
from mlx_server.errors import BadRequest
from mlx_server.generation.embeddings import Embeddings, EmbedRequest, Input, embed
from mlx_server.http.metrics import Metrics
from mlx_server.http.security import keyed_router, wants
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread_if_large
from mlx_server.requests import DETERMINISTIC_HEADER, Tier

Dimensions = Annotated[int, Field(ge=1, lt=2**31), WHOLE]


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


def to_request(body: EmbeddingsBody, client: str, tier: Tier = Tier.DEFAULT) -> EmbedRequest:
    return EmbedRequest(
        model=body.model,
        inputs=checked(inputs_of(body.input)),
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        truncate=bool(body.truncate),
        client=client,
        tier=tier,
    )


def inputs_of(
    sent: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
) -> tuple[Input, ...]:
    """A list of token ids is one input; any other list is several."""
    if isinstance(sent, str):
        return (sent,)
    if ids := tuple(item for item in sent if isinstance(item, int)):
        return (ids,)
    several = (item for item in sent if not isinstance(item, int))
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


def listed(
    embeddings: Embeddings, model: str, write: Callable[[bytes], str | msgspec.Raw]
) -> dict[str, Any]:
    data = (
        {"object": "embedding", "index": index, "embedding": write(vector)}
        for index, vector in enumerate(embeddings.vectors)
    )
    usage = {"prompt_tokens": embeddings.tokens, "total_tokens": embeddings.tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def numbers(vector: bytes) -> msgspec.Raw:
    """The vector as JSON: a list of Python's numbers takes several times the memory."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return msgspec.Raw(msgspec.json.encode(values.tolist()))


PATH = "/v1/embeddings"

router = keyed_router()


@router.post(PATH, openapi_extra=documented(PATH, EmbeddingsBody))
async def embeddings(http: Request) -> Response:
    body = await read(http, EmbeddingsBody)
    embeddings = await embedded(http, to_request(body, http.state.client, http.state.tier))
    is_base64 = body.encoding_format == "base64"
    write = (lambda vector: b64encode(vector).decode()) if is_base64 else numbers
    ignored = ignored_header(await in_thread_if_large(body.ignored))
    return vectors_response(embeddings, listed(embeddings, body.model, write), ignored)


SMALL_BYTES = 64 << 10
"""Vectors of at most so many bytes are written at once."""


def vectors_response(
    embeddings: Embeddings | None, body: Mapping[str, Any], headers: Mapping[str, str]
) -> Response:
    """The vectors as JSON take several times their memory, so that many are written as they are
    sent. body: has their iterator."""
    is_small = sum(map(len, embeddings.vectors if embeddings else ())) <= SMALL_BYTES
    pieces = json_pieces(body)
    return in_pieces(list(pieces) if is_small else pieces, headers)


async def embedded(http: Request, request: EmbedRequest) -> Embeddings:
    """The embeddings, unless the client leaves before."""
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    request = replace(request, deterministic=wants(http, DETERMINISTIC_HEADER))
    return await while_connected(
        http, metrics.answers.counted(embed(request, pool), request.client)
    )
