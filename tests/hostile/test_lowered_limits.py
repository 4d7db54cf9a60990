"""Limits that would take long to reach, lowered; and that each limit is reached by some test."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLParserLimits
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.responses.runs import Runs
from mlx_server.api.responses.web_socket import UnstoredContext
from mlx_server.engine.messages import Grammar
from mlx_server.errors import AdapterInvalid
from mlx_server.fair_queue import FairQueue
from mlx_server.generation.review import turns_to_check
from mlx_server.grammars.compiler import BYTES, LIMITS
from mlx_server.store import ItemRecord
from mlx_server.worker.constrained_decoding import grammar_compiler
from tests.api import wire
from tests.api.wire import ScriptedEngine
from tests.models import adapter_files as adapters


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        yield client


def socket_memory(size: int) -> bool:
    memory = UnstoredContext(Runs(cast(Any, None), 1).socket_memory)
    memory.keep("a", [ItemRecord("i", b"x")])
    memory.keep("b", [ItemRecord("i", b"x" * (size - 1))])
    return "b" in memory.contexts


def checks(count: int) -> bool:
    async def all_at_once() -> bool:
        turns = turns_to_check("a client of this test")
        async with asyncio.timeout(0.1):
            for _ in range(count):
                await turns.acquire()
        return True

    try:
        return asyncio.run(all_at_once())
    except TimeoutError:
        return False


def remembered(clients: int) -> bool:
    queue = FairQueue()
    for client in range(clients):
        queue.charge(str(client), 1)
    queue.advance(0)
    return all(queue.time(str(client)) for client in range(clients))


def rules(count: int) -> bool:
    source = "start: a1\n" + "".join(f'a{at}: "x"\n' for at in range(1, count))
    try:
        grammar_compiler.compiled(Grammar(source), cast(Any, None))
    except grammar_compiler.GrammarRefused as refusal:
        return "rules" not in str(refusal)
    except AttributeError:  # it went on to the vocabulary
        return True
    return True


CASES: dict[str, tuple[int, Callable[[int], bool]]] = {
    "SOCKETS_MEMORY_BYTES": (100, socket_memory),
    "CHECK_PROCESSES": (3, checks),
    "REMEMBERED_CLIENTS": (5, remembered),
    "WHOLE_GRAMMAR_RULES": (5, rules),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_within_passes_and_one_more_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, passes = CASES[name]
    monkeypatch.setattr(limits, name, most)
    assert passes(most)
    assert not passes(most + 1)


AMBIGUOUS = 'start: s\ns: "a" | s s | s s s\n'
EXPRESSION = "start: /(a|b)*a(a|b){8}/\n"
OF_GRAMMARS = {
    "GRAMMAR_ITEMS_IN_ROW": ("max_items_in_row", AMBIGUOUS, 20),
    "GRAMMAR_STEP_ITEMS": ("step_max_items", AMBIGUOUS, 5),
    "GRAMMAR_FIRST_STEPS": ("initial_lexer_fuel", EXPRESSION, 5),
    "GRAMMAR_STEPS": ("step_lexer_fuel", EXPRESSION, 5),
    "GRAMMAR_STATES": ("max_lexer_states", EXPRESSION, 5),
    "GRAMMAR_SIZE": ("max_grammar_size", AMBIGUOUS, 5),
}


@pytest.mark.parametrize("name", OF_GRAMMARS)
def test_what_a_grammar_may_cost(name: str) -> None:
    field, source, low = OF_GRAMMARS[name]
    fields = [field for field, *_ in OF_GRAMMARS.values()]
    ours = LIMITS
    assert getattr(ours, field) == getattr(limits, name)
    lowered = LLParserLimits(**{each: getattr(ours, each) for each in fields} | {field: low})
    assert goes_on(source, ours)
    assert not goes_on(source, lowered)


@pytest.mark.parametrize(
    "repeated", ["(ab|aab|aaab|abb|b)+", "a*", "(a|aa)+", ".*", "a{900}", r"(\w+\s?)*"]
)
def test_an_expression_that_repeats_what_repeats_takes_few_steps(repeated: str) -> None:
    """They are a twentieth of those that end a row, so such an expression holds its request for
    milliseconds. With the 200,000 tokens of gpt-oss each takes at most 3,800 steps for a token."""
    few = LLParserLimits(step_lexer_fuel=limits.GRAMMAR_STEPS // 20, max_lexer_states=2000)
    assert goes_on(f"start: /({repeated})*c{{900}}/\n", few)


def goes_on(source: str, parser_limits: LLParserLimits) -> bool:
    matcher = LLMatcher(BYTES, source, log_level=0, limits=parser_limits)
    for byte in b"aaabaabb":
        if matcher.is_error():
            return False
        mask = matcher.compute_bitmask()
        if mask[byte >> 3] >> (byte & 7) & 1:
            matcher.consume_token(byte)
    return not matcher.is_error()


def test_the_header_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapters.peft_adapter(tmp_path / "a", adapters.peft_tensors())
    (weights,) = path.glob("*.safetensors")
    size = int.from_bytes(weights.read_bytes()[:8], "little")
    monkeypatch.setattr(limits, "ADAPTER_HEADER_BYTES", size)
    adapters.read(path)
    monkeypatch.setattr(limits, "ADAPTER_HEADER_BYTES", size - 1)
    with pytest.raises(AdapterInvalid):
        adapters.read(path)


def test_the_parts_of_a_logged_path(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    logged = []
    for parts in (limits.LOGGED_PATH_PARTS - 1, 10 * limits.LOGGED_PATH_PARTS):
        caplog.clear()
        with caplog.at_level(logging.INFO, "mlx_server.access"):
            client.get("/v1" + "/models" * (parts - 1))
        (record,) = caplog.records
        logged += re.findall(r"/v1\S*", record.getMessage())
    few, many = logged
    assert few == "/v1" + "/models" * (limits.LOGGED_PATH_PARTS - 2)
    assert many.count("/") <= limits.LOGGED_PATH_PARTS
    assert many.endswith("/*")
