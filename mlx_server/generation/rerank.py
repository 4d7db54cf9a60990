"""Ranks documents by how well they answer a query.

A generative reranker gets the prompt of Qwen3-Reranker for each document. The document's score is
the probability of `yes`, relative to that of `yes` or `no`. An encoder computes one score for
a query and a document itself.
"""

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from mlx_server.engine.messages import Embed
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.generation.embeddings import compute, within_total
from mlx_server.generation.plan import prepared_for
from mlx_server.models.architectures import is_reranker
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.control_token_guard import text_tokens
from mlx_server.request_threads import in_thread

TURN, END = "<|im_start|>", "<|im_end|>"
BEFORE = (
    f"{TURN}system\nJudge whether the Document meets the requirements based on the Query and the "
    f'Instruct provided. Note that the answer can only be "yes" or "no".{END}\n{TURN}user\n'
)
AFTER = f"{END}\n{TURN}assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

NO_AND_YES = ["no", "yes"]


@dataclass(frozen=True)
class RerankRequest:
    model: str
    query: str
    documents: tuple[str, ...]
    instruction: str | None = None
    """The instruction for the model on what makes a document relevant; None: `INSTRUCTION`."""
    client: str = ""
    deterministic: bool = False
    """Whether the same request gets the same bits, whatever else the engine does."""


@dataclass(frozen=True)
class Relevance:
    model: str
    scores: tuple[float, ...]
    """The relevance of each document from 0 to 1, in the order of the documents."""
    tokens: int
    """The tokens of all documents' prompts together."""


async def rerank(request: RerankRequest, pool: Pool) -> Relevance:
    """Compute the scores. Cancelling the caller cancels the engine's rows."""
    with pool.row_slots.take(1, request.client):
        prepared = await prepared_for("rerank", request.model, pool)
        command = Embed(row=0, model=prepared.id, inputs=[], client=request.client)
        command.deterministic = request.deterministic or prepared.spec.deterministic
        if is_reranker(prepared.checkpoint.config):
            return await _by_encoder(request, prepared, command, pool)
        command.logits_of = answers_of(prepared)
        prompts = await in_thread(tokenized, prepared, request, model=prepared.id)
        logits = await compute(pool, prepared, command, prompts)
        return Relevance(prepared.id, tuple(map(score, logits)), sum(map(len, prompts)))


async def _by_encoder(
    request: RerankRequest, prepared: PreparedModel, command: Embed, pool: Pool
) -> Relevance:
    if request.instruction is not None:
        raise BadRequest(
            f"{prepared.id} reads no instruction. Leave `instruction` out.", param="instruction"
        )
    command.scores = True
    query, documents = request.query, request.documents
    texts, starts = await in_thread(pairs, prepared, query, documents, model=prepared.id)
    scores = await compute(pool, prepared, command, texts, starts)
    return Relevance(prepared.id, tuple(map(probability, scores)), sum(map(len, texts)))


def score(logits: bytes) -> float:
    no, yes = struct.unpack("<2f", logits)
    highest = max(no, yes)
    no, yes = math.exp(no - highest), math.exp(yes - highest)
    return yes / (no + yes)


def answers_of(prepared: PreparedModel) -> list[int]:
    """The ids of the tokens for no and yes, in this order. Raises BadRequest if the vocabulary
    lacks one of them or a token of the prompt."""
    named = prepared.checkpoint.config.get("classifier_from_token") or NO_AND_YES
    if not isinstance(named, list) or [type(each) for each in named] != [str, str]:
        raise _no_reranker(prepared, "`classifier_from_token` in its config.json is not two tokens")
    ids = {each: prepared.checkpoint.tokenizer.id_of(each) for each in (TURN, END, *named)}
    if missing := [each for each, id in ids.items() if id is None]:
        raise _no_reranker(prepared, f"its tokenizer has no token {missing[0][:100]!r}")
    return [id for each in named if (id := ids[each]) is not None]


def _no_reranker(prepared: PreparedModel, reason: str) -> BadRequest:
    return BadRequest(
        f"{prepared.id} can't rank documents here: {reason}. Use a model like Qwen3-Reranker.",
        param="model",
    )


def tokenized(prepared: PreparedModel, request: RerankRequest) -> list[list[int]]:
    """The prompt of each document. Names of control tokens in the client's texts stay text."""
    tokenizer = prepared.checkpoint.tokenizer
    before, after = tokenizer.encode(BEFORE), tokenizer.encode(AFTER)
    room = prepared.context_length - len(before) - len(after)
    instruction = INSTRUCTION if request.instruction is None else request.instruction
    asked = f"<Instruct>: {instruction}\n<Query>: {request.query}\n<Document>: "

    def prompt(place: int, document: str) -> list[int]:
        what, param = f"document {place} with the query and the prompt", f"documents[{place}]"
        return [*before, *_fitting(prepared, asked + document, room, what, param), *after]

    return within_total((prompt(*each) for each in enumerate(request.documents)), "documents")


def _fitting(prepared: PreparedModel, text: str, room: int, what: str, param: str) -> list[int]:
    with suppress(ContextTooLong):
        found = text_tokens(prepared.checkpoint, text, max(0, room))
        if len(found) <= room:
            return found
    raise ContextTooLong(
        f"There are more than {prepared.context_length} tokens in {what}, which is the most that "
        "the model takes. Shorten or split it.",
        param=param,
    )


def pairs(
    prepared: PreparedModel, query: str, documents: Sequence[str]
) -> tuple[list[list[int]], list[int]]:
    """The tokens of each pair of query and document, and the index at which the document begins.
    Names of control tokens in the client's texts stay text."""
    tokenizer = prepared.checkpoint.tokenizer
    room = prepared.context_length - len(tokenizer.pair([], [])[0])
    asked = _fitting(prepared, query, room, "the query", "query")
    starts: list[int] = []

    def pair(place: int, document: str) -> list[int]:
        what, param = f"document {place} with the query", f"documents[{place}]"
        found = _fitting(prepared, document, room - len(asked), what, param)
        text, start = tokenizer.pair(asked, found)
        starts.append(start)
        return text

    return within_total((pair(*each) for each in enumerate(documents)), "documents"), starts


def probability(score: bytes) -> float:
    """The sigmoid of the encoder's logit, which sentence-transformers and Text Embeddings Inference
    report as the score."""
    (logit,) = struct.unpack("<f", score)
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
