"""The spine: runs a request and yields the events of its answers, which every endpoint folds."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version

from msgspec import structs

from mlx_server import __version__
from mlx_server.engine.client import EngineClient, Item, RowStream
from mlx_server.engine.messages import (
    Admitted,
    ComputeAhead,
    Generate,
    Logprobs,
    Prefilled,
    PrefillProgress,
    PromptLogprobs,
    Token,
)
from mlx_server.errors import (
    BadRequest,
    ContextTooLong,
    InvalidGrammar,
    Unavailable,
    UpstreamFailed,
)
from mlx_server.events import Answer, Event, Started, TokenCounts, total
from mlx_server.generation.constraints import constrain_continuation, is_format_required
from mlx_server.generation.output import RowOutput
from mlx_server.generation.plan import (
    PromptOverflow,
    RequestPlan,
    plan,
    retry_row,
    shortened,
    with_continued_messages,
)
from mlx_server.generation.rendering import chat_prompt, without_volatile_lines
from mlx_server.generation.review import Review
from mlx_server.generation.upstream import generate_upstream
from mlx_server.messages import Conversation, Message
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.lease import Lease
from mlx_server.pool.models import LoadedModel
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.pool.readmission import Attempts, fingerprint
from mlx_server.prompts.branches import next_beginning
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest
from mlx_server.system.logs import log_model
from mlx_server.system.turns import turn

log = logging.getLogger("mlx_server")

FEW_EVENTS = 64
"""Events that are yielded without giving others their turn. An answer that was held back may have
tens of thousands."""


def generate(request: GenerateRequest, pool: Pool) -> AsyncGenerator[Event]:
    """Yield the events of the request's answers. Errors in the request are raised before `Started`.
    Closing the generator cancels the engine's rows, or the requests to another server."""
    events = _answered(request, pool)
    return pool.recorder.recorded(request, events) if pool.recorder else events


def _answered(request: GenerateRequest, pool: Pool) -> AsyncGenerator[Event]:
    model = pool.models.upstream(request.model)
    if model and model.upstream.fallback:
        return _first_to_answer(request, pool, (request.model, *model.upstream.fallback))
    return _generated(request, pool)


def _generated(request: GenerateRequest, pool: Pool) -> AsyncGenerator[Event]:
    if model := pool.models.upstream(request.model):
        return generate_upstream(request, pool, model)
    return generate_here(request, pool)


async def _first_to_answer(
    request: GenerateRequest, pool: Pool, names: Sequence[str]
) -> AsyncGenerator[Event]:
    """Yield the events of the first of the named models that begins to answer."""
    for name in names:
        async with aclosing(_generated(replace(request, model=name), pool)) as events:
            try:
                started = await anext(events)
            except (UpstreamFailed, Unavailable) as error:
                if name == names[-1]:
                    raise
                log.warning(
                    "%s can't answer, so the next fallback model is asked: %s", name, error.code
                )
                continue
            yield started
            async for event in events:
                yield event
            return


async def generate_here(request: GenerateRequest, pool: Pool) -> AsyncGenerator[Event]:
    """Yield the events, as `generate` does, for a model that this server runs."""
    with ExitStack() as slots:
        rows = len(request.prompts) * request.n
        slots.enter_context(pool.row_slots.take(rows, request.client))
        name, its_adapter = pool.models.split(request.model)
        prepared = await pool.prepared(name)
        log_model(prepared.id, prepared.family.name)
        request, left_out = without_volatile_lines(request)
        request = with_continued_messages(prepared, request)
        adapter = await _adapter(pool, prepared, its_adapter, request)
        planned = await _planned(prepared, request, adapter)
        if pixels := _pixel_bytes(planned.rows):
            slots.enter_context(pool.pixel_slots.take(pixels, request.client))
        most = pool.most_tokens(prepared, planned.demand.rows, adapter)
        planned = shortened(planned, prepared, request, most)
        demand = replace(planned.demand, client=request.client, tier=request.tier)
        attempts = Attempts(prepared.id, partial(fingerprint, planned.rows))
        answers: list[RetryingAnswer] = []
        items: list[Item] = []
        answered = Answer()
        while not attempts.is_done:
            visit = pool.visit(attempts, prepared, demand, adapter)
            async with visit as lease, AsyncExitStack() as on:
                _check_ids(lease.model, request)
                engine = lease.engine
                attempts.was_sent = True
                if answers:  # the engine that had them was lost
                    feed, items = await _sent(engine, lease, on, [a.resumed for a in answers]), []
                else:
                    admitted = await _admit(engine, lease, on, planned, prepared, request)
                    planned, answers, feed, items = admitted
                    started = _started(
                        prepared, planned, adapter, partial(_unfinished, answers), request
                    )
                    yield replace(started, normalized=left_out, rows=lease.progress)
                    for answer in answers:
                        for event in answer.begin():
                            yield event
                by_row = {answer.row.row: answer for answer in answers}
                while True:
                    for item in items:
                        await turn()  # there may be as many as came while the client read nothing
                        answer = by_row[item.row]
                        if not attempts.has_answered and isinstance(item, Token | PromptLogprobs):
                            pool.answered(attempts)
                        for event in (reported := await answer.feed(item)):
                            answered.add(event)
                            yield event
                            if len(reported) > FEW_EVENTS:
                                await turn()
                        if answer.finished:
                            engine.cancel([item.row])
                            lease.left([item.row])
                        elif more := answer.next_row():
                            engine.add(more, feed)
                            lease.began([more])
                            by_row[more.row] = answer
                    answers = [answer for answer in answers if not answer.finished]
                    if not answers:
                        break
                    items = await feed.take()
        compute_ahead(pool, prepared, request, planned.rows[0], answered)


def _pixel_bytes(rows: Iterable[Generate]) -> int:
    pictures = {each.digest: each for row in rows for each in row.pictures}
    return sum(len(each.pixels) for each in pictures.values())


async def _sent(
    engine: EngineClient, lease: Lease, on: AsyncExitStack, rows: Sequence[Generate]
) -> RowStream:
    feed = await on.enter_async_context(engine.generate(rows))
    lease.began(rows)
    return feed


async def _planned(
    prepared: PreparedModel, request: GenerateRequest, adapter: LeasedAdapter | None
) -> RequestPlan:
    try:
        return await in_thread(plan, prepared, request, adapter, model=prepared.id)
    except ContextTooLong as error:
        raise PromptOverflow(error, prepared, request) from None


async def _admit(
    engine: EngineClient,
    lease: Lease,
    on: AsyncExitStack,
    planned: RequestPlan,
    prepared: PreparedModel,
    request: GenerateRequest,
) -> tuple[RequestPlan, list["RetryingAnswer"], RowStream, list[Item]]:
    """Send the rows and wait until the engine has admitted them all. If it can't compile a grammar
    that the client did not require, send them again without it.

    Returns the plan of the admitted rows, their answers and stream, and the items that it has given
    so far.
    """
    while True:
        feed = await _sent(engine, lease, on, planned.rows)
        await asyncio.sleep(0)  # the engine computes while the answers are prepared
        answers = [
            RetryingAnswer(prepared, index, row, request, unchecked=planned.unchecked)
            for index, row in enumerate(planned.rows)
        ]
        try:
            return planned, answers, feed, await _until_admitted(feed, len(planned.rows))
        except InvalidGrammar as error:
            if is_format_required(request):
                error.param = request.format_param if request.format else "tools"
                raise
            await on.aclose()
            lease.left(lease.rows)
        planned = planned.without_constraints()


async def _adapter(
    pool: Pool, prepared: PreparedModel, of_model: str | None, request: GenerateRequest
) -> LeasedAdapter | None:
    requested = request.adapter
    if of_model and requested and requested != of_model:
        raise BadRequest(
            f"`model` names the adapter {of_model!r}, and `adapter` names {requested!r}. Name only "
            "one of them.",
            param="adapter",
        )
    name = requested or of_model
    return await pool.adapter(prepared, name) if name else None


def _started(
    prepared: PreparedModel,
    planned: RequestPlan,
    adapter: LeasedAdapter | None,
    unfinished: Callable[[], TokenCounts],
    request: GenerateRequest,
) -> Started:
    model = f"{prepared.id}:{adapter.spec.name}" if adapter else prepared.id
    return Started(
        model,
        planned.prompt_tokens,
        planned.ignored,
        system_fingerprint(prepared, adapter),
        planned.unenforced,
        request.reported_tier,
        planned.rows[0].sampling,
        planned.tool_output_tokens,
        unfinished=unfinished,
    )


def _unfinished(answers: Iterable["RetryingAnswer"]) -> TokenCounts:
    """The tokens of the unfinished answers. One that took several rows is counted once."""
    running = {id(answer): answer for answer in answers if not answer.finished}
    return total(answer.review.counts for answer in running.values())


async def _until_admitted(feed: RowStream, rows: int) -> list[Item]:
    """Wait until the engine has admitted every row; return all items received until then."""
    items: list[Item] = []
    while sum(isinstance(item, Admitted) for item in items) < rows:
        items += await feed.take()
    return items


def _check_ids(model: LoadedModel, request: GenerateRequest) -> None:
    """Raise BadRequest for token ids outside the vocabulary, whose size is known once the model is
    loaded."""
    prompts = [prompt for prompt in request.prompts if isinstance(prompt, tuple)]
    for param, ids in [("logit_bias", request.logit_bias), *(("prompt", ids) for ids in prompts)]:
        for token in ids:
            if not 0 <= token < model.vocabulary:
                raise BadRequest(
                    f"`{param}` has the token id {token}; the ids of {model.prepared.id} go from "
                    f"0 to {model.vocabulary - 1}.",
                    param=param,
                )


class RetryingAnswer:
    """The answer to one prompt, across every row that was needed to produce it.

    A row that stops right after its reasoning is continued with the answer prefix. A rejected
    answer is generated again by another row.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        index: int,
        row: Generate,
        request: GenerateRequest,
        *,
        unchecked: bool,
    ) -> None:
        """unchecked: whether the grammar does not enforce all of the requested format."""
        policy = prepared.spec.repair
        self.review = Review(index, request, prepared.family, policy, self, unchecked=unchecked)
        self._prepared, self._index, self._request = prepared, index, request
        self._first_row = row
        self.row = row
        """The row that generates the answer now."""
        self._generated: list[int] = []
        """What it has generated."""
        self._pieces = self._scored = self._scored_again = 0
        """The pieces of its prompt's log probabilities, these, and those that came once more."""
        self.attempt = RowOutput(prepared, index, row, request)
        self._next: Generate | None = None

    @property
    def finished(self) -> bool:
        return self.review.finished

    def begin(self) -> Iterator[Event]:
        return self.attempt.begin()

    def next_row(self) -> Generate | None:
        """Takes the row that is to continue this answer or generate it again, if there is one."""
        row, self._next = self._next, None
        if row:
            self.row, self._generated = row, []
        return row

    @property
    def resumed(self) -> Generate:
        """The row, for another engine than the one that was lost with it."""
        is_scored = self._pieces > 0 and self._scored >= len(self.row.prompt) - 1
        scores = self.row.prompt_logprobs and not is_scored
        self.row = structs.replace(
            self.row, generated=list(self._generated), prompt_logprobs=scores
        )
        self._scored_again = 0
        return self.row

    async def feed(self, item: Item) -> list[Event]:
        match item:
            case Token(id=id):
                self._generated.append(id)
            case PromptLogprobs(logprobs=logprobs):
                item = self._unscored(item, logprobs)
            case Prefilled() | PrefillProgress() if self._generated:
                return []  # of tokens that the client has
        events: Iterable[Event] = self.attempt.feed(item)
        if isinstance(item, PromptLogprobs):  # those of a long prompt take seconds
            events = await in_thread(list, events)
        reported = await self.review.reviewed(events)
        if row := self.attempt.next_row():
            prompt = self._request.prompts[self._index // self._request.n]
            assert isinstance(prompt, Conversation)
            await in_thread(constrain_continuation, self._prepared, self._request, prompt, row)
            self._next = row
        return reported

    def _unscored(self, item: PromptLogprobs, logprobs: list[Logprobs]) -> PromptLogprobs:
        self._pieces += 1
        known = min(self._scored - self._scored_again, len(logprobs))
        self._scored_again += len(logprobs)
        self._scored = max(self._scored, self._scored_again)
        return structs.replace(item, logprobs=logprobs[known:])

    async def begin_again(self, conversation: Conversation) -> bool:
        prepared, request = self._prepared, self._request
        row = await in_thread(
            retry_row, prepared, request, conversation, self._first_row, model=prepared.id
        )
        if row is None:
            return False
        self._next = row
        self.attempt = RowOutput(prepared, self._index, row, request)
        return True


def compute_ahead(
    pool: Pool,
    prepared: PreparedModel,
    request: GenerateRequest,
    row: Generate,
    answer: Answer,
) -> None:
    """Lets the engine compute the next prompt, if the request has one complete answer in a
    conversation and models.yaml sets `compute_ahead`.

    row: the request's first row, whose adapter and cache scope the next prompt will have.
    """
    is_one = len(request.prompts) == request.n == 1
    is_whole = answer.finish_reason not in (None, "length")
    # an answer that is deterministic goes on from whole pieces of its prompt only
    if not (is_one and is_whole and prepared.spec.compute_ahead) or row.deterministic:
        return
    (conversation,) = request.prompts
    if isinstance(conversation, Conversation) and prepared.transcript is None:
        message = answer.message()
        pool.compute_ahead(prepared, lambda: _command(prepared, conversation, message, row))


def _command(
    prepared: PreparedModel, conversation: Conversation, answer: Message, row: Generate
) -> ComputeAhead:
    return ComputeAhead(
        row.model,
        next_beginning(conversation, answer, lambda each: chat_prompt(prepared, each).tokens),
        prepared.spec.compute_ahead,
        adapter=row.adapter,
        adapter_scale=row.adapter_scale,
        cache_scope=row.cache_scope,
        on_disk=row.on_disk,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


SOFTWARE = (__version__, *map(_version, ("mlx", "mlx-lm")))
"""The versions, read here: no request waits for it."""

DIGITS = 10
"""The number of hexadecimal digits, the same as in OpenAI's fingerprints."""


def system_fingerprint(prepared: PreparedModel, adapter: LeasedAdapter | None) -> str:
    """A digest of the software's versions and of the files of the model and the adapter."""
    parts = (SOFTWARE, prepared.stamp, adapter.spec.digest if adapter else None)
    return f"fp_{sha256(repr(parts).encode()).hexdigest()[:DIGITS]}"
