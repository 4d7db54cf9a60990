"""IBM's object alone and within ours, over the same recorded HTTP: what each makes of it."""

import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mlx_server.clients.watsonx import ModelInference
from tests.clients.recorded import Wire
from tests.clients.watsonx.exchanges import (
    EXCHANGES,
    Exchange,
    kept,
    of_installed_package,
    outcome,
    recorded,
    shown,
)

RECORDED = recorded()
GOOD = ("an answer as it should be", "thoughts apart")
"""Answers in which nothing is wrong."""


class Recording:
    """Returns what IBM's object has returned, for the answers that are left."""

    params = None

    def __init__(self, answers: tuple[Any, ...], raw: Any) -> None:
        self._left = [raw] if len(answers) == 1 else list(answers)
        self._whole = raw

    def chat(self, **given: Any) -> Any:
        return self._left.pop(0)

    async def achat(self, **given: Any) -> Any:
        return self.chat()

    def chat_stream(self, **given: Any) -> Iterator[Any]:
        yield from self.chat()

    async def achat_stream(self, **given: Any) -> AsyncIterator[Any]:
        for chunk in self.chat():
            yield chunk

    def generate_text(self, **given: Any) -> Any:
        return self._whole


def _joined(chunks: list[Wire], name: str) -> str:
    said = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get(name) or "" for delta in said)


def test_everything_is_recorded() -> None:
    assert list(RECORDED) == list(EXCHANGES)


@pytest.mark.parametrize("name", [name for name in EXCHANGES if name != "a text, streamed"])
def test_what_ours_makes_of_what_ibms_returned(name: str) -> None:
    exchange, found = EXCHANGES[name], RECORDED[name]
    model = ModelInference.around(Recording(exchange.answers, found["raw"]))
    assert shown(outcome(model, exchange)) == found["read"]


@pytest.mark.parametrize("name", [name for name in EXCHANGES if name.startswith(GOOD)])
def test_an_answer_with_nothing_wrong_is_ibms_own(name: str) -> None:
    raw, read = RECORDED[name]["raw"], RECORDED[name]["read"]
    if isinstance(raw, dict):
        assert read == raw
    else:
        for said in ("content", "reasoning_content"):
            assert read["message"].get(said, "") == _joined(raw, said)
        assert "mlx_server" not in read


@pytest.mark.parametrize("name", [name for name in EXCHANGES if "call" in name])
def test_what_is_wrong_alone_is_right_within_ours(name: str) -> None:
    raw, read = json.dumps(RECORDED[name]["raw"]), RECORDED[name]["read"]
    assert "<|channel|>" in raw
    message = read["choices"][0]["message"] if "choices" in read else read["message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert "<|" not in json.dumps(read)
    assert read["mlx_server"]["repairs"]


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_requests_are_ibms_own(name: str) -> None:
    """But for what describes a schema, which is asked for once more if it was ignored."""
    found, ignored = RECORDED[name], name == "a schema that is ignored"
    assert (found["read_requests"] == found["raw_requests"]) is not ignored
    assert len(found["read_requests"]) == len(found["raw_requests"]) + ignored


@pytest.mark.skipif(not importlib.util.find_spec("ibm_watsonx_ai"), reason="IBM's is not installed")
@pytest.mark.parametrize(("name", "exchange"), EXCHANGES.items(), ids=EXCHANGES)
def test_the_installed_package_does_what_is_recorded(name: str, exchange: Exchange) -> None:
    assert kept(of_installed_package(exchange)) == RECORDED[name]
