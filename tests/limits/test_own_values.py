"""Limits that other tests pass with a lower value, here at their own, in the parts that count."""

import asyncio
import sqlite3
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_server import limits
from mlx_server.generation import tool_loop
from mlx_server.mcp.connectors import Connectors, Toolset
from mlx_server.mcp.errors import ConnectionLost, cut
from mlx_server.mcp.limits import CountingSemaphore, Meter
from mlx_server.mcp.limits import McpLimits as McpLimits
from mlx_server.messages import Conversation, Message
from mlx_server.pool.actions import ModelFacts, Refuse
from mlx_server.pool.concurrency import RowSlots
from mlx_server.pool.policy import Policy
from mlx_server.pool.pool_limits import PoolLimits as PoolLimits
from mlx_server.requests import Approval, GenerateRequest, McpServer, McpTools
from mlx_server.store import Retention
from mlx_server.store.usage import check
from tests.limits.boundaries import Boundary, passes

MCP = McpLimits()


def in_one_batch_and_waiting(rows: int) -> None:
    with RowSlots(limits.CONCURRENCY.value + limits.QUEUE.value).take(rows, "me"):
        pass


def waiting_answers(rows: int) -> None:
    in_one_batch_and_waiting(limits.CONCURRENCY.value + rows)


def batched_answers(rows: int) -> None:
    in_one_batch_and_waiting(rows + limits.QUEUE.value)


def seconds_of_waiting(seconds: int) -> bool:
    """For the memory of another model. The limit itself is the moment of the refusal."""
    facts = {"a": ModelFacts(9), "b": ModelFacts(9)}
    policy = Policy(facts, budget=10, wait_seconds=PoolLimits().wait_seconds)
    policy.request(1, "a", 1, 0.0)
    policy.loaded("a", 9, 0.0)
    policy.request(2, "b", 1, 0.0)
    return not any(isinstance(action, Refuse) for action in policy.tick(seconds - 1))


def mcp_servers(count: int) -> None:
    Connectors()._check([McpServer(f"s{n}", url="http://localhost") for n in range(count)])


def mcp_calls(count: int) -> None:
    approvals = tuple(Approval(str(n), "a", "f", "{}", approve=True) for n in range(count))
    request = GenerateRequest("m", (Conversation((Message("user", "Hi"),)),))
    tools = McpTools((McpServer("a", url="http://a"),), approvals)
    tool_loop._check(request, tools, tool_loop.LIMITS)


def run(work: Coroutine[Any, Any, object]) -> None:
    asyncio.run(work)


async def _taken(semaphore: CountingSemaphore, count: int) -> None:
    semaphore._wait_seconds = 0.0
    for _ in range(count):
        await semaphore.take(1)


def mcp_processes(count: int) -> None:
    run(_taken(Connectors()._processes, count))


def mcp_sessions(count: int) -> None:
    run(_taken(Connectors()._http_sessions, count))


def mcp_responses(count: int) -> None:
    async def opened() -> None:
        connectors = Connectors()
        async with AsyncExitStack() as open_ones:
            for _ in range(count):
                await open_ones.enter_async_context(connectors.open([]))

    run(opened())


def mcp_result(size: int) -> bool:
    return cut("x" * size, MCP.result_bytes) == "x" * size


def mcp_results(size: int) -> bool:
    async def called() -> bool:
        async def call(tool: str, arguments: str) -> str:
            return "x" * size

        server = SimpleNamespace(
            requested=SimpleNamespace(label="a"),
            listing=SimpleNamespace(tools={"f": None}),
            call=call,
        )
        toolset = Toolset([cast(Any, server)], MCP)
        return await toolset.call("a", "f", "{}") == "x" * size

    return asyncio.run(called())


def counted(most: int, size: int) -> bool:
    try:
        Meter(most).count(size)
    except ConnectionLost:
        return False
    return True


def mcp_message(size: int) -> bool:
    return counted(MCP.message_bytes, size)


def mcp_session(size: int) -> bool:
    return counted(MCP.session_bytes, size)


def stored(**of: int) -> None:
    """of: bytes of each key."""
    with sqlite3.connect(":memory:") as db:
        db.execute("CREATE TABLE usage (owner TEXT, bytes INTEGER)")
        db.executemany("INSERT INTO usage VALUES (?, ?)", of.items())
        check(db, "me", Retention())
    db.close()


def stored_of_one_key(size: int) -> None:
    stored(me=size)


def stored_in_all(size: int) -> None:
    stored(me=1, you=size - 1)


@pytest.mark.parametrize(
    "case",
    [
        Boundary("CONCURRENCY", passes(batched_answers)),
        Boundary("QUEUE", passes(waiting_answers)),
        Boundary("WAIT_SECONDS", seconds_of_waiting),
        Boundary("MCP_SERVERS", passes(mcp_servers)),
        Boundary("MCP_CALLS", passes(mcp_calls)),
        Boundary("MCP_PROCESSES", passes(mcp_processes)),
        Boundary("MCP_SESSIONS", passes(mcp_sessions)),
        Boundary("MCP_RESPONSES", passes(mcp_responses)),
        Boundary("MCP_RESULT_BYTES", mcp_result),
        Boundary("MCP_ALL_RESULT_BYTES", mcp_results),
        Boundary("MCP_MESSAGE_BYTES", mcp_message),
        Boundary("MCP_SESSION_BYTES", mcp_session),
        Boundary("STORE_BYTES", passes(stored_in_all)),
        Boundary("STORE_BYTES_PER_KEY", passes(stored_of_one_key)),
    ],
    ids=str,
)
def test_one_past_it(case: Boundary, monkeypatch: pytest.MonkeyPatch) -> None:
    case.check(monkeypatch)
