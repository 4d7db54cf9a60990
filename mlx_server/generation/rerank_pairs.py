"""Ranks documents with an encoder, which computes one score for a query and a document."""

import math
import struct
from collections.abc import Sequence

from mlx_server.errors import ContextTooLong
from mlx_server.generation.embeddings import check_total
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.control_token_guard import text_tokens
from mlx_server.request_threads import check_wanted


def pairs(
    prepared: PreparedModel, query: str, documents: Sequence[str]
) -> tuple[list[list[int]], list[int]]:
    """The tokens of each pair of query and document, and the index at which the document begins.
    Names of control tokens in the client's texts stay text."""
    tokenizer = prepared.checkpoint.tokenizer
    room = prepared.context_length - len(tokenizer.pair([], [])[0])
    asked = _fitting(prepared, query, room, "the query", "query")
    texts: list[list[int]] = []
    starts: list[int] = []
    total = 0
    for place, document in enumerate(documents):
        check_wanted()
        what, param = f"document {place} with the query", f"documents[{place}]"
        found = _fitting(prepared, document, room - len(asked), what, param)
        text, start = tokenizer.pair(asked, found)
        texts.append(text)
        starts.append(start)
        total += len(text)
        check_total(total, "documents")
    return texts, starts


def probability(score: bytes) -> float:
    """The sigmoid of the encoder's logit, which sentence-transformers and Text Embeddings Inference
    report as the score."""
    (logit,) = struct.unpack("<f", score)
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


def _fitting(prepared: PreparedModel, text: str, room: int, what: str, param: str) -> list[int]:
    error = ContextTooLong(
        f"There are more tokens in {what} than the model takes. Shorten or split it.", param=param
    )
    try:
        found = text_tokens(prepared.checkpoint, text, max(0, room))
    except ContextTooLong:
        raise error from None
    if len(found) > room:
        raise error
    return found
