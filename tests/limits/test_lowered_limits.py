"""Limits that other tests pass with a lower value, and limits of objects that are made of them.

Where no test lowers it, the product has the value of the table.
"""

import ast
import inspect
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import h11
import pytest
from fastapi import FastAPI
from mcp import MCPError

from mlx_server import limits
from mlx_server.api.transport.http import StrictHttp
from mlx_server.api.transport.slow_clients import SlowClientGuard
from mlx_server.api.transport.web_sockets import StrictWebSockets
from mlx_server.app import server_of
from mlx_server.config.settings import Settings
from mlx_server.engine.messages import Generate
from mlx_server.generation import plan, rendering, tool_loop
from mlx_server.mcp import Toolset, addresses
from mlx_server.mcp.limits import McpLimits as McpLimits
from mlx_server.mcp.server import McpConnection
from mlx_server.messages import Conversation, Message
from mlx_server.pool.pool_limits import PoolLimits as PoolLimits
from mlx_server.prompts.text_size import memory_of
from mlx_server.repair import jsonish
from mlx_server.repair.malformed import Malformed
from mlx_server.requests import GenerateRequest, McpServer
from mlx_server.schemas.compiler import LIMITS
from mlx_server.store import Retention
from mlx_server.system.log_file import write_to
from mlx_server.worker.constrained_decoding import grammar_compiler
from mlx_server.worker.constrained_decoding.token_trie import Vocabulary
from mlx_server.worker.prefill.order import PromptScheduler
from mlx_server.worker.prefill.prompt_cache import PromptCache
from tests.limits.boundaries import Boundary, passes
from tests.parsers.harmony.played import ids, parser
from tests.worker.prefill.test_prompt_cache import filled, known

TESTS = Path(__file__).parent.parent
SETTINGS = Settings()
MCP, LOOP, PARSER = McpLimits(), tool_loop.ToolLoopLimits(), LIMITS

LOWERED: dict[str, tuple[object, str]] = {
    "CONCURRENCY": (
        SETTINGS.server.concurrency,
        "pool/test_pool.py::test_a_full_queue_refuses_and_a_place_that_is_left_is_taken",
    ),
    "QUEUE": (
        PoolLimits().queue,
        "pool/test_pool.py::test_a_full_queue_refuses_and_a_place_that_is_left_is_taken",
    ),
    "WAIT_SECONDS": (
        SETTINGS.server.wait_seconds,
        "pool/test_policy.py::test_waiting_ends_but_not_while_the_model_loads",
    ),
    "RECEIVE_SECONDS": (
        SETTINGS.server.receive_seconds,
        "hostile/test_protocols.py::test_a_handshake_that_the_app_does_not_end",
    ),
    "SEND_SECONDS": (SETTINGS.server.send_seconds, "hostile/test_readers.py::test_how_long"),
    "STORE_BYTES": (
        Retention().bytes,
        "store/test_usage.py::test_a_key_has_its_limit_and_all_have_one",
    ),
    "STORE_BYTES_PER_KEY": (
        Retention().bytes_per_key,
        "store/test_usage.py::test_a_key_has_its_limit_and_all_have_one",
    ),
    "STORED_RESPONSES": (SETTINGS.store.count, "store/test_usage.py::test_pruning_makes_room"),
    "LOG_FILE_BYTES": (
        inspect.signature(write_to).parameters["rotate_bytes"].default,
        "system/test_log_file.py::test_nothing_is_lost_and_old_lines_go_first",
    ),
    "MCP_SERVERS": (
        MCP.servers,
        "mcp/test_connectors.py::test_servers_are_few_and_have_names_of_their_own",
    ),
    "MCP_RESPONSES": (
        MCP.responses,
        "generation/test_tool_loop.py::test_too_many_responses_at_a_time_are_refused",
    ),
    "MCP_PROCESSES": (
        MCP.processes,
        "mcp/test_limits.py::test_processes_are_so_many_until_the_last_one_is_gone",
    ),
    "MCP_SESSIONS": (
        MCP.sessions,
        "mcp/test_limits.py::test_connections_by_http_are_so_many",
    ),
    "MCP_WAIT_SECONDS": (
        MCP.wait_seconds,
        "mcp/test_limits.py::test_processes_are_so_many_until_the_last_one_is_gone",
    ),
    "MCP_OPEN_SECONDS": (
        MCP.open_seconds,
        "mcp/test_server.py::test_a_list_that_never_comes",
    ),
    "MCP_CALL_SECONDS": (MCP.call_seconds, "mcp/test_http.py::test_a_call_fails_alone"),
    "MCP_RESULT_BYTES": (
        MCP.result_bytes,
        "mcp/test_server.py::test_a_large_result_is_cut_with_a_notice",
    ),
    "MCP_ALL_RESULT_BYTES": (
        MCP.all_result_bytes,
        "mcp/test_limits.py::test_results_of_all_calls_together",
    ),
    "MCP_MESSAGE_BYTES": (MCP.message_bytes, "mcp/test_server.py::test_a_call_fails_alone"),
    "MCP_SESSION_BYTES": (MCP.session_bytes, "mcp/test_server.py::test_a_call_fails_alone"),
    "MCP_CALLS": (
        LOOP.calls,
        "generation/test_tool_loop.py::test_calls_of_a_response_have_a_limit_of_our_own",
    ),
    "MCP_ROUNDS": (
        LOOP.rounds,
        "generation/test_tool_loop.py::test_a_model_that_calls_without_end_has_to_answer",
    ),
    "MCP_ROUND_SECONDS": (
        LOOP.seconds,
        "generation/test_tool_loop.py::test_a_model_that_calls_without_end_has_to_answer",
    ),
    "MCP_RESOLVERS": (addresses.RESOLVERS._max_workers, "mcp/test_rebinding.py"),
    "GRAMMAR_ITEMS_IN_ROW": (
        PARSER.max_items_in_row,
        "worker/constrained_decoding/test_grammar_compiler.py::test_a_row_whose_next_step_would_cost_too_much_ends_alone",
    ),
    "GRAMMAR_FIRST_STEPS": (PARSER.initial_lexer_fuel, "grammars/test_hostile.py"),
    "GRAMMAR_STEPS": (PARSER.step_lexer_fuel, "grammars/test_hostile.py"),
    "GRAMMAR_STEP_ITEMS": (PARSER.step_max_items, "grammars/test_hostile.py"),
    "GRAMMAR_STATES": (PARSER.max_lexer_states, "grammars/test_hostile.py"),
    "GRAMMAR_SIZE": (PARSER.max_grammar_size, "grammars/test_hostile.py"),
    "FRAME_BYTES": (
        StrictWebSockets.budget._most_bytes,
        "api/transport/test_web_sockets.py::test_large_messages_of_many_are_not_all_read",
    ),
}
"""Name: what the product has it as, and the test that passes it."""


@pytest.mark.parametrize("name", LOWERED)
def test_what_tests_lower_is_else_the_tables(name: str) -> None:
    found, test = LOWERED[name]
    assert found == getattr(limits, name).value
    path, _, function = test.partition("::")
    defined = {
        node.name
        for node in ast.parse((TESTS / path).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not function or function in defined


def grammar_rules(count: int) -> bool:
    try:
        grammar_compiler._compile("\n" * count, cast(Vocabulary, None))
    except grammar_compiler.GrammarRefused:
        return False
    except AttributeError:  # then it is compiled
        return True
    raise AssertionError


def repaired_json(looks: int) -> bool:
    ends = len(jsonish.ENDS.findall('{"a": 1,}'))
    room = -(-looks // ends) - len('{"a":1,}')
    try:
        jsonish._repaired(f'{{"a":{" " * room}1,}}')
    except Malformed:
        return False
    return True


def mcp_error(characters: int) -> bool:
    server = McpConnection(
        McpServer("a", url="http://a"), cast(Any, None), McpLimits(), cast(Any, None)
    )
    text = "x" * characters
    return str(server._public_error(MCPError(code=1, message=text))) == text


def header(tokens: int) -> bool:
    """Of Harmony, without an end: what is no header any more is shown."""
    reading = parser()
    written = [*ids("<|channel|>"), *ids("a") * (tokens - 1)]
    return not [event for token in written for event in reading.feed(token, "")]


def ahead(size: int) -> bool:
    """Bytes of further requests while the first one is answered."""
    transport, flow = Mock(), Mock()
    conn = SimpleNamespace(trailing_data=(b"x" * size, False), their_state=h11.DONE)
    StrictHttp._keep_listening(
        cast(Any, SimpleNamespace(conn=conn, transport=transport, flow=flow))
    )
    return not transport.abort.called


def waiting_bytes(size: int) -> bool:
    """On a WebSocket that answers one message."""
    protocol = Mock(_waiting_bytes=size - 1, _message=b"x", _reserved=0, close_sent=False)
    protocol.configure_mock(disconnected=False, _unanswered=1)
    protocol.conn.reader.buffer = b""
    protocol.transport.is_closing.return_value = False
    StrictWebSockets._look(protocol)
    return not protocol._pause.called


def waiting_frames(count: int) -> bool:
    """One is answered, and these wait."""
    protocol = Mock(_unanswered=0, _waiting_bytes=0, _reserved=0, close_sent=False)
    for _ in range(1 + count):
        StrictWebSockets._hand_on(protocol, b"x")
    return not protocol._fail.called


def clients(count: int) -> bool:
    """All of them are remembered, next to one whose prompt waits."""
    turns: PromptScheduler[Any] = PromptScheduler()
    turns.add(SimpleNamespace(client="stays", number=0, left=1))
    for at in range(count):
        prompt = SimpleNamespace(client=f"c{at}", number=at + 1, left=10)
        turns.add(prompt)
        turns.begin(prompt)
        turns.computed(prompt, prompt.client, 10)
        turns.end()
    turns.add(SimpleNamespace(client="new", number=count + 1, left=1))
    return len(turns._served) == count + 2


def prompts(count: int) -> bool:
    cache = PromptCache(1 << 30)
    filled(cache, *["m"] * count)
    return all(known(cache, "m", seed) for seed in range(count))


def prompt_text(size: int) -> None:
    prepared: Any = SimpleNamespace(id="m", context_length=1)
    empty = GenerateRequest("m", (Conversation((Message("user", ""),)),))
    around = memory_of(empty)
    text = "x" * (size - around)
    rendering.check_text(prepared, GenerateRequest("m", (Conversation((Message("user", text),)),)))


@pytest.mark.parametrize(
    "case",
    [
        Boundary("WHOLE_GRAMMAR_RULES", grammar_rules),
        Boundary("REPAIRED_JSON_STEPS", repaired_json, lowered=999),
        Boundary("MCP_ERROR_CHARACTERS", mcp_error),
        Boundary("HARMONY_HEADER_TOKENS", header),
        Boundary("PIPELINED_BYTES", ahead),
        Boundary("SOCKET_BYTES", waiting_bytes),
        Boundary("SOCKET_FRAMES", waiting_frames),
        Boundary("REMEMBERED_CLIENTS", clients),
        Boundary("CACHED_PROMPTS", prompts, lowered=3),
        Boundary("PROMPT_TEXT_BYTES", passes(prompt_text)),
    ],
    ids=str,
)
def test_one_past_it(case: Boundary, monkeypatch: pytest.MonkeyPatch) -> None:
    case.check(monkeypatch)


def test_a_correction_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "may_retry", lambda prepared, request: True)
    prepared: Any = SimpleNamespace(family=SimpleNamespace(answer_prefix=""))
    request = GenerateRequest("m", (Conversation((Message("user", "x"),)),))
    row = cast(Generate, SimpleNamespace(prompt=[1] * 10, max_tokens=5))
    # the second prompt has the first one, the answer and the correction
    longest = plan._longest(prepared, request, row)
    assert longest == 10 + 5 + limits.CORRECTION_TOKENS.value + row.max_tokens


def test_uvicorn_has_the_tables_limits() -> None:
    config = server_of(SETTINGS, FastAPI()).config
    assert config.backlog == limits.ACCEPTED_AT_ONCE.value
    assert config.timeout_keep_alive == limits.IDLE_SECONDS.value


def test_calls_of_mcp_servers_wait_for_each_other() -> None:
    places = Toolset([], MCP)._call_slots
    assert places._value == limits.MCP_PARALLEL_CALLS.value


def test_the_kernel_keeps_little_of_an_answer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = Mock()
        transport.get_extra_info.return_value = ours
        SlowClientGuard().connection_made(transport)
        kept = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert kept in (limits.SEND_BUFFER_BYTES.value, 2 * limits.SEND_BUFFER_BYTES.value)
