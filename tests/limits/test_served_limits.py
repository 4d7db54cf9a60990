"""What clients and MCP servers may let grow: at the limit it is served, one past it not."""

from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest
from mcp import types

from mlx_server import limits
from mlx_server.api import access_log, errors
from mlx_server.api.responses.event_log import EventLog
from mlx_server.api.responses.runs import Runs
from mlx_server.api.responses.web_socket import UnstoredContext, _lane
from mlx_server.api.transport.byte_budget import ByteBudget
from mlx_server.api.transport.framing import StrictConnection
from mlx_server.mcp.limits import McpLimits as McpLimits
from mlx_server.mcp.server import Lister, Listing, bound
from mlx_server.prompts.message_normalization import arguments_object
from mlx_server.requests import McpServer
from mlx_server.store import ItemRecord
from mlx_server.system import descriptors
from tests.limits.boundaries import Boundary, passes


def head(request: bytes) -> bool:
    connection = StrictConnection()
    connection.receive_data(request)
    try:
        return isinstance(connection.next_event(), h11.Request)
    except h11.RemoteProtocolError:
        return False


def header_lines(count: int) -> bool:
    others = b"".join(b"a%d: b\r\n" % at for at in range(count - 1))
    return head(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + others + b"\r\n")


def head_bytes(size: int) -> bool:
    """h11 refuses a head of more bytes as soon as it has them and no end of it."""
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\na: "
    connection = StrictConnection()
    connection.receive_data(request.ljust(size, b"x"))
    try:
        return connection.next_event() is h11.NEED_DATA
    except h11.RemoteProtocolError:
        return False


def lane(characters: int) -> None:
    _lane({"stream_id": "x" * characters})


def arguments(items: int) -> bool:
    text = f"[{'1,' * (items - 1)}1]"
    return bool(arguments_object(text) != text)


def listed_tool(name: str, size: int = 0) -> types.Tool:
    return types.Tool(name=name, description="x" * size, input_schema={})


def listing(tools: list[types.Tool]) -> Listing:
    lister = Lister(McpServer("a", url="http://a"), McpLimits())
    lister.add(types.ListToolsResult(tools=tools))
    return lister.listing


def mcp_tools(count: int) -> bool:
    return not listing([listed_tool(str(at)) for at in range(count)]).left_out


def mcp_bytes(size: int) -> bool:
    around = listing([listed_tool("a")]).sizes["a"]
    return not listing([listed_tool("a", size - around)]).left_out


def mcp_name(characters: int) -> bool:
    return not listing([listed_tool("x" * characters)]).left_out


def several(sizes: list[int]) -> Listing:
    found = Listing()
    for at, size in enumerate(sizes):
        found.sizes[str(at)] = size
        found.tools[str(at)] = cast(Any, None)
    return found


def all_tools(count: int) -> bool:
    one, other = several([1] * (count // 2)), several([1] * (count - count // 2))
    bound([one, other], McpLimits())
    return not other.left_out


def all_bytes(size: int) -> bool:
    one, other = several([size // 2]), several([size - size // 2])
    bound([one, other], McpLimits())
    return not other.left_out


def events(size: int) -> bool:
    log = EventLog(ByteBudget(1 << 40))
    log.add({"a": "x" * (size - len('{"a":""}'))})
    return not log.is_full


def said(size: int) -> list[ItemRecord]:
    return [ItemRecord("i", b"x" * size)]


def remembered(count: int) -> bool:
    memory = UnstoredContext(ByteBudget(1 << 30))
    for at in range(count):
        memory.keep(str(at), said(1))
    return len(memory.contexts) == count


def of_all_sockets(size: int) -> bool:
    budget = ByteBudget(limits.SOCKETS_MEMORY_BYTES.value)
    assert budget.take(limits.SOCKETS_MEMORY_BYTES.value - 10)
    memory = UnstoredContext(budget)
    memory.keep("a", said(size - limits.SOCKETS_MEMORY_BYTES.value + 10))
    return bool(memory.contexts)


def in_the_background(count: int) -> None:
    runs = Runs(cast(Any, None), 1)
    for at in range(count):
        record = SimpleNamespace(owner="", id=str(at))
        run = SimpleNamespace(record=record, log=None)
        runs.claim(cast(Any, SimpleNamespace(run=run)))


def logged_parts(count: int) -> bool:
    scope: Any = {"path": "/" + "/".join(["a"] * count)}
    return access_log._route_words_of(scope).count("/") == count


def wrong_field(characters: int) -> bool:
    return errors._param_name(["x" * characters]) == "x" * characters


def wrong_field_message(characters: int) -> bool:
    problem: Any = {"type": "value_error", "msg": "x" * characters, "loc": (), "ctx": {}}
    return not str(errors._bad_request("", problem).message).endswith("...")


@pytest.mark.parametrize(
    "case",
    [
        Boundary("HEADERS", header_lines),
        Boundary("HEAD_BYTES", head_bytes),
        Boundary("LANE_CHARACTERS", passes(lane)),
        Boundary("ARGUMENT_ITEMS", arguments),
        Boundary("MCP_TOOLS", mcp_tools),
        Boundary("MCP_SCHEMA_BYTES", mcp_bytes),
        Boundary("TOOL_NAME_CHARACTERS", mcp_name),
        Boundary("MCP_ALL_TOOLS", all_tools),
        Boundary("MCP_ALL_SCHEMA_BYTES", all_bytes),
        Boundary("STREAM_LOG_BYTES", events),
        Boundary("SOCKET_RESPONSES", remembered),
        Boundary("SOCKETS_MEMORY_BYTES", of_all_sockets),
        Boundary("BACKGROUND_RESPONSES", passes(in_the_background)),
        Boundary("LOGGED_PATH_PARTS", logged_parts),
        Boundary("WRONG_FIELD_CHARACTERS", wrong_field),
        Boundary("WRONG_FIELD_MESSAGE_CHARACTERS", wrong_field_message),
    ],
    ids=str,
)
def test_one_past_it(case: Boundary, monkeypatch: pytest.MonkeyPatch) -> None:
    case.check(monkeypatch)


def test_connections_are_so_many_where_there_are_descriptors_for_them() -> None:
    most = limits.CONNECTIONS.value
    assert descriptors.connections(2 * most - 2) == most - 1
    assert descriptors.connections(2 * most) == descriptors.connections(4 * most) == most
    of_one = limits.CONNECTIONS_PER_ADDRESS.value
    assert descriptors.connections_per_address(most) == of_one
    assert descriptors.connections_per_address(2 * most) == of_one
