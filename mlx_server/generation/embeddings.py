"""Computes embeddings: the texts are tokenised, grouped by length and sent to the engine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from mlx_server import limits
from mlx_server.engine.messages import Embed, Embedded
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.generation.plan import prepared_for
from mlx_server.models.checkpoint import Embedder
from mlx_server.pool.lease import MemoryDemand
from mlx_server.pool.models import LoadedModel
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.pool.readmission import Attempts, fingerprint
from mlx_server.request_threads import check_wanted, in_thread
from mlx_server.requests import Tier

GROUP_ROWS, GROUP_TOKENS = 32, 2048
"""Limits of a group of texts that are computed together: the texts, and their padded tokens."""

SENT_TOKENS = 16 * GROUP_TOKENS
"""The padded tokens of the groups that are sent to the engine together."""

Input = str | tuple[int, ...]
"""A text, or token ids, to which no special tokens are added."""


@dataclass(frozen=True)
class EmbedRequest:
    model: str
    inputs: tuple[Input, ...]
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: bool = False
    """Whether an input that is too long is truncated; else the request is refused."""
    client: str = ""
    tier: Tier = Tier.DEFAULT
    deterministic: bool = False
    """Whether the same request gets the same bits, whatever else the engine does."""


@dataclass(frozen=True)
class Embeddings:
    model: str
    vectors: tuple[bytes, ...]
    """The vectors as little-endian 32-bit floats, in the order of the inputs."""
    tokens: int
    """The tokens of all inputs together."""


async def embed(request: EmbedRequest, pool: Pool) -> Embeddings:
    """Compute the embeddings. Cancelling the caller cancels the engine's rows."""
    with pool.row_slots.take(1, request.client):
        prepared = await prepared_for("embed", request.model, pool)
        _check_embedder(prepared.id, prepared.embedder, request)
        texts = await in_thread(tokenized, prepared, request, model=prepared.id)
        vectors = await compute(pool, prepared, _command(prepared, request), texts)
    return Embeddings(prepared.id, vectors, sum(map(len, texts)))


async def compute(
    pool: Pool,
    prepared: PreparedModel,
    command: Embed,
    texts: Sequence[Sequence[int]],
    second_from: Sequence[int] = (),
) -> tuple[bytes, ...]:
    """The engine's results for the texts, in their order: vectors, or a reranker's scores.

    command: a template for the commands of all groups. second_from: see `Embed`.
    """
    groups: list[list[int]] = await in_thread(list, grouped(texts))
    found: dict[int, bytes] = {}
    demand = _demand(prepared, command, texts, groups)
    attempts = Attempts(prepared.id, partial(_fingerprint, command, texts))
    while not attempts.is_done:
        async with pool.visit(attempts, prepared, demand) as lease:
            await in_thread(_check_ids, lease.model, texts)
            attempts.was_sent = True
            groups = [group for group in groups if group[0] not in found]
            for sent in _sent_together(groups, texts):
                rows = [_row(command, texts, second_from, group) for group in sent]
                async with lease.engine.embed(rows) as feed:
                    lease.began(rows)
                    places = dict(zip((row.row for row in rows), sent, strict=True))
                    while places:
                        for item in await feed.take():
                            assert isinstance(item, Embedded)
                            pool.answered(attempts)
                            found.update(zip(places.pop(item.row), item.vectors, strict=True))
                            lease.left([item.row])
    return tuple(found[place] for place in range(len(texts)))


def _fingerprint(command: Embed, texts: Sequence[Sequence[int]]) -> str:
    return fingerprint([msgspec.structs.replace(command, inputs=[list(each) for each in texts])])


def _sent_together(
    groups: Sequence[list[int]], texts: Sequence[Sequence[int]]
) -> Iterator[list[list[int]]]:
    """Yields the groups that the engine gets at a time: to write and to read a million token ids in
    one piece would keep all else waiting."""
    sent: list[list[int]] = []
    tokens = 0
    for group in groups:
        size = len(group) * len(texts[group[-1]])
        if sent and tokens + size > SENT_TOKENS:
            yield sent
            sent, tokens = [], 0
        sent.append(group)
        tokens += size
    if sent:
        yield sent


def grouped(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yields the indices of each group of texts, which have similar lengths; the last is the
    longest."""
    group: list[int] = []
    for place in sorted(range(len(texts)), key=lambda place: len(texts[place])):
        tokens = (len(group) + 1) * len(texts[place])
        if group and (len(group) == GROUP_ROWS or tokens > GROUP_TOKENS):
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _row(
    command: Embed,
    texts: Sequence[Sequence[int]],
    second_from: Sequence[int],
    group: Sequence[int],
) -> Embed:
    return msgspec.structs.replace(
        command,
        inputs=[list(texts[place]) for place in group],
        second_from=[second_from[place] for place in group] if second_from else [],
    )


def _demand(
    prepared: PreparedModel,
    command: Embed,
    texts: Sequence[Sequence[int]],
    groups: Sequence[list[int]],
) -> MemoryDemand:
    """The memory of the largest group, since the engine computes a client's groups one by one."""
    largest = max(groups, key=lambda group: len(group) * len(texts[group[-1]]))
    longest = len(texts[largest[-1]])
    return MemoryDemand(
        prepared.kv, longest, longest, len(largest), command.client, tier=command.tier
    )


def _check_embedder(id: str, embedder: Embedder, request: EmbedRequest) -> None:
    if embedder.unsupported:
        raise BadRequest(
            f"{id} can't compute embeddings here: its sentence-transformers files ask for "
            f"{embedder.unsupported}. Use another embedding model, such as Qwen3-Embedding.",
            param="model",
        )
    asked, width = request.dimensions, embedder.width
    if asked is not None and width and asked > width:
        raise BadRequest(
            f"`dimensions` is {asked}, but the embeddings of {id} have {width}.",
            param="dimensions",
        )
    if request.prompt_name is not None and request.prompt_name not in embedder.prompts:
        named = ", ".join(list(embedder.prompts)[:20]) or "none"
        raise BadRequest(
            f"{id} has no prompt {request.prompt_name[:100]!r}; its prompts are: {named}.",
            param="prompt_name",
        )


def _command(prepared: PreparedModel, request: EmbedRequest) -> Embed:
    embedder = prepared.embedder
    return Embed(
        row=0,
        model=prepared.id,
        inputs=[],
        pooling=embedder.pooling,
        normalize=embedder.normalizes,
        dimensions=request.dimensions,
        client=request.client,
        tier=request.tier,
        deterministic=request.deterministic or prepared.spec.deterministic,
    )


def tokenized(prepared: PreparedModel, request: EmbedRequest) -> list[list[int]]:
    embedder = prepared.embedder
    name = request.prompt_name or embedder.default_prompt or ""
    tokenizer = InputTokenizer(prepared, embedder.prompts.get(name, ""), request)
    inputs = enumerate(request.inputs)
    return within_total((tokenizer.tokens(text, place) for place, text in inputs), "input")


def within_total(texts: Iterable[list[int]], param: str) -> list[list[int]]:
    """The texts. Raises BadRequest as soon as they have too many tokens in total."""
    found: list[list[int]] = []
    total, most = 0, limits.EMBEDDED_TOKENS
    for text in texts:
        check_wanted()
        found.append(text)
        total += len(text)
        if total > most:
            raise BadRequest(
                f"`{param}` should have no more than {most} tokens in total. Send it in several "
                "requests.",
                param=param,
            )
    return found


class InputTokenizer:
    """Tokenises inputs with special tokens, and truncates or refuses those that are too long."""

    def __init__(self, prepared: PreparedModel, prompt: str, request: EmbedRequest) -> None:
        self._tokenizer = prepared.checkpoint.tokenizer
        self._prompt = prompt
        self._request = request
        embedder, ends = prepared.embedder, prepared.checkpoint.tokens.get("eos_token", "")
        end = self._tokenizer.id_of(ends) if embedder.ends_with_end_token else None
        self._end = [] if end is None else [end]
        added = len(self._special([]))
        self._most = min(embedder.max_tokens or prepared.context_length, prepared.context_length)
        self._room = self._most - added

    def tokens(self, text: Input, place: int) -> list[int]:
        if isinstance(text, tuple):
            found = list(self._fitting(text, self._most, place))
        else:
            found = self._special(self._fitting(self._text_tokens(text, place), self._room, place))
        if not found:
            raise BadRequest(f"Input {place} is empty: it has no tokens.", param=self._param(place))
        return found

    def _text_tokens(self, text: str, place: int) -> list[int]:
        text = self._prompt + text
        if self._request.truncate:
            text = text[: self._room * self._tokenizer.longest]
        try:
            return self._tokenizer.encode_prompt(text, self._room, add_special_tokens=False)
        except ContextTooLong:
            if not self._request.truncate:
                raise self._too_long(place) from None
        return self._tokenizer.encode(text)

    def _fitting(self, ids: Sequence[int], room: int, place: int) -> Sequence[int]:
        if len(ids) > room and not self._request.truncate:
            raise self._too_long(place)
        return ids[:room]

    def _special(self, ids: Sequence[int]) -> list[int]:
        whole = self._tokenizer.with_special_tokens(ids)
        return [*whole, *self._end] if whole[-1:] != self._end else whole

    def _too_long(self, place: int) -> ContextTooLong:
        return ContextTooLong(
            f"This model's maximum context length is {self._most} tokens. However, input {place} "
            "has more. Split it.",
            param=self._param(place),
        )

    def _param(self, place: int) -> str:
        return f"input[{place}]" if len(self._request.inputs) > 1 else "input"


def _check_ids(model: LoadedModel, texts: Sequence[Sequence[int]]) -> None:
    highest = max(max(text) for text in texts)
    if highest >= model.vocabulary:
        raise BadRequest(
            f"`input` has the token id {highest}; the ids of {model.prepared.id} go from 0 to "
            f"{model.vocabulary - 1}.",
            param="input",
        )
