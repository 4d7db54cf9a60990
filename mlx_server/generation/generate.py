"""The spine: a request to the events of its answers. Every endpoint folds these."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace

from mlx_server.engine.client import EngineClient, Item, RowStream
from mlx_server.engine.messages import Admitted
from mlx_server.errors import BadRequest, InvalidGrammar
from mlx_server.events import Event, Started
from mlx_server.generation.constraints import is_format_required
from mlx_server.generation.plan import RequestPlan, plan, shortened
from mlx_server.generation.retries import RetryingAnswer
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.entry import LoadedModel
from mlx_server.pool.lease import Lease
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest


async def generate(request: GenerateRequest, pool: Pool) -> AsyncGenerator[Event]:
    """Raises what is wrong with the request before `Started`; closing it frees its rows."""
    with pool.row_slot(len(request.prompts) * request.n, request.client):
        name, its_adapter = pool.named(request.model)
        prepared = await pool.prepared(name)
        adapter = await _adapter(pool, prepared, its_adapter, request)
        planned = await in_thread(plan, prepared, request, adapter, model=prepared.id)
        most = pool.most_tokens(prepared, planned.demand.rows, adapter)
        planned = shortened(planned, prepared, request, most)
        demand = replace(planned.demand, client=request.client)
        async with pool.lease(prepared, demand, adapter) as lease, AsyncExitStack() as on:
            _check_ids(lease.model, request)
            engine = pool.engine
            planned, feed, items = await _admit(engine, lease, on, planned, request)
            yield _started(prepared, planned, adapter)
            courses = {
                row.row: RetryingAnswer(prepared, index, row, request, unchecked=planned.unchecked)
                for index, row in enumerate(planned.rows)
            }
            for course in courses.values():
                for event in course.begin():
                    yield event
            while True:
                for item in items:
                    course = courses[item.row]
                    async for event in course.feed(item):
                        yield event
                    if course.finished:
                        engine.cancel([item.row])
                        lease.left([item.row])
                    elif more := course.next_row():
                        engine.add(more, feed)
                        lease.began([more])
                        courses[more.row] = course
                if all(course.finished for course in courses.values()):
                    return
                items = await feed.take()


async def _admit(
    engine: EngineClient,
    lease: Lease,
    on: AsyncExitStack,
    planned: RequestPlan,
    request: GenerateRequest,
) -> tuple[RequestPlan, RowStream, list[Item]]:
    """Waits until the engine has taken every row; the plan may come to ask for less."""
    while True:
        feed = await on.enter_async_context(engine.generate(planned.rows))
        lease.began(planned.rows)
        try:
            return planned, feed, await _until_admitted(feed, len(planned.rows))
        except InvalidGrammar as error:
            if is_format_required(request):
                error.param = request.format_param if request.format else "tools"
                raise
            await on.aclose()
            lease.left(lease.rows)
        planned = planned.without_constraints()  # the model's own calls will do


async def _adapter(
    pool: Pool, prepared: PreparedModel, of_model: str | None, request: GenerateRequest
) -> LeasedAdapter | None:
    asked = request.adapter
    if of_model and asked and asked != of_model:
        raise BadRequest(
            f"`model` names the adapter {of_model!r} and `adapter` {asked!r}: name one.",
            param="adapter",
        )
    name = asked or of_model
    return await pool.adapter(prepared, name) if name else None


def _started(
    prepared: PreparedModel, planned: RequestPlan, adapter: LeasedAdapter | None
) -> Started:
    model = f"{prepared.id}:{adapter.spec.name}" if adapter else prepared.id
    fingerprint = adapter.spec.digest[:16] if adapter else None
    return Started(
        model,
        planned.prompt_tokens,
        planned.ignored,
        fingerprint,
        planned.unenforced,
        planned.rows[0].sampling,
        planned.messages,
    )


async def _until_admitted(feed: RowStream, rows: int) -> list[Item]:
    """Waits until the engine has taken every row; returns what else came by then."""
    items: list[Item] = []
    while sum(isinstance(item, Admitted) for item in items) < rows:
        items += await feed.take()
    return items


def _check_ids(model: LoadedModel, request: GenerateRequest) -> None:
    """Only the loaded model tells how many there are."""
    prompts = [prompt for prompt in request.prompts if isinstance(prompt, tuple)]
    for param, ids in [("logit_bias", request.logit_bias), *(("prompt", ids) for ids in prompts)]:
        for token in ids:
            if not 0 <= token < model.vocabulary:
                raise BadRequest(
                    f"`{param}` names token {token}; {model.prepared.id} knows the ids from 0 to "
                    f"{model.vocabulary - 1}.",
                    param=param,
                )
