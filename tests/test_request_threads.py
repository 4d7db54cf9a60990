"""The threads in which requests are worked for: who gets a place, and until when."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import fields
from functools import wraps
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.errors import Overloaded
from mlx_server.messages import Conversation, Message, Tool, ToolCall, characters_of
from mlx_server.request_threads import (
    LARGE_BYTES,
    Abandoned,
    RequestThreads,
    check_wanted,
    client_of_request,
    size_of_request,
)

LARGE = LARGE_BYTES + 1
SECONDS = 20.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def begin(
    threads: RequestThreads,
    work: Callable[[], Any],
    size: int = 0,
    model: str | None = None,
    client: str = "",
) -> asyncio.Task[Any]:
    async def run() -> Any:
        client_of_request.set(client)
        size_of_request.set(size)  # of this task alone
        return await threads.run(work, model)

    return asyncio.create_task(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110, threads set it
            await asyncio.sleep(0.001)


async def done(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, SECONDS)


def held() -> tuple[threading.Event, Callable[[], bool]]:
    free = threading.Event()
    return free, lambda: free.wait(SECONDS)


@in_loop
async def test_a_place_is_taken_until_its_thread_has_ended() -> None:
    threads, (free, work) = RequestThreads(), held()
    tasks = [begin(threads, work) for _ in range(limits.REQUEST_THREADS)]
    await until(lambda: threads.busy == limits.REQUEST_THREADS)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert threads.busy == limits.REQUEST_THREADS
    late = begin(threads, lambda: "late")
    await asyncio.sleep(0.05)
    assert not late.done()
    free.set()
    assert await done(late) == "late"
    await until(lambda: threads.busy == 0)


@in_loop
async def test_large_ones_and_those_of_one_model_leave_places_for_others() -> None:
    threads, (free, work) = RequestThreads(), held()
    large = [begin(threads, work, LARGE) for _ in range(9)]
    of_one = [begin(threads, work, model="a") for _ in range(9)]
    most = limits.LARGE_REQUEST_THREADS + limits.MODEL_REQUEST_THREADS
    await until(lambda: threads.busy == most)
    assert await done(begin(threads, lambda: "small", model="b")) == "small"
    free.set()
    await done(asyncio.gather(*large, *of_one))


@pytest.mark.parametrize(("size", "model"), [(0, None), (LARGE, None), (0, "a")])
@in_loop
async def test_no_client_keeps_another_waiting(size: int, model: str | None) -> None:
    """Neither with slow templates of a model nor with large files."""
    threads, (free, work) = RequestThreads(), held()
    of_one = [begin(threads, work, size, model, "greedy") for _ in range(9)]
    await until(lambda: threads.busy > 0)
    assert threads.busy <= limits.REQUEST_THREADS - limits.OTHERS_REQUEST_THREADS
    assert await done(begin(threads, lambda: "other", size, model, "patient")) == "other"
    free.set()
    await done(asyncio.gather(*of_one))


@in_loop
async def test_the_smaller_one_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LARGE_REQUEST_THREADS", 1)
    threads, (free, work) = RequestThreads(), held()
    order: list[int] = []
    busy = [begin(threads, work, LARGE) for _ in range(limits.LARGE_REQUEST_THREADS)]
    await until(lambda: threads.busy == len(busy))
    sizes = (40 * LARGE, LARGE, 80 * LARGE)
    lower_sizes = [begin(threads, lambda n=n: order.append(n), n) for n in sizes]  # type: ignore[misc]
    await asyncio.sleep(0.01)
    free.set()
    await done(asyncio.gather(*busy, *lower_sizes))
    assert order == sorted(sizes)


@in_loop
async def test_work_for_a_client_that_left_ends_at_its_next_stage() -> None:
    threads, (free, wait) = RequestThreads(), held()
    ended = list[str]()

    def work() -> None:
        wait()
        try:
            check_wanted()
        except Abandoned:
            ended.append("abandoned")
            raise
        ended.append("went on")

    left, stays = begin(threads, work), begin(threads, work)
    await until(lambda: threads.busy == 2)
    left.cancel()
    await asyncio.wait([left])
    free.set()
    await done(stays)
    await until(lambda: threads.busy == 0)
    assert sorted(ended) == ["abandoned", "went on"]


@in_loop
async def test_more_bytes_than_are_held_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_REQUEST_BYTES", 3 * LARGE)
    threads, (free, work) = RequestThreads(), held()
    tasks = [begin(threads, work, LARGE) for _ in range(3)]
    await until(lambda: threads.busy == 2)
    with pytest.raises(Overloaded):
        await begin(threads, work, LARGE)
    assert await done(begin(threads, lambda: "small")) == "small"
    free.set()
    await done(asyncio.gather(*tasks))


def test_every_text_of_a_conversation_counts() -> None:
    """A field that is added later has to be filled in here, or this fails. The content counts once,
    though it is in the parts too."""
    call = ToolCall("i" * 1, "n" * 2, "a" * 4, server="s" * 8, extra_content={"x": "e" * 65536})
    content = "c" * 16
    message = Message(
        "user", content, "n" * 32, "r" * 64, (call,), "t" * 128, "commentary", parts=(content,)
    )
    tool = Tool("t" * 256, "d" * 512, {"k" * 1024: [{"enum": ["e" * 2048]}]}, True, ("u" * 32768,))
    whole = Conversation(
        (message,), (tool,), {"o" * 4096: ["v"] * 8192}, {"f": {"x": "y" * 16384}}, True
    )
    for each in (call, message, tool, whole):
        for field in fields(each):
            assert getattr(each, field.name), field.name
    own = len("user") + len("commentary") + len("enum") + len("fx") + len("x")
    assert characters_of(whole) == 2**17 - 1 + own
