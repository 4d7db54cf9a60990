"""A piece of an answer takes as long after a long answer as after a short one.

What is compared is the thread time of the same pieces, after little has come and after much.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.upstream.dialects import reason_of_end
from mlx_server.upstream.pieces import read_piece
from mlx_server.upstream.reading import AnswerReader, ReadingOptions
from mlx_server.upstream.responses import SseReader
from mlx_server.upstream.text_families import opening_of_reasoning, text_family
from tests.upstream.playing import Json, delta

pytestmark = pytest.mark.slow

LITTLE, MUCH = 2_000, 800_000
PIECES = 300
MOST = 5
"""How many times as long the pieces may take after much. Work that grows takes 20 times or more."""

TOOLS = (Tool("f", "", {"type": "object", "properties": {"a": {"type": "string"}}}),)


def call(index: int | None = 0, id: str = "1", **function: Any) -> Json:
    numbered = {} if index is None else {"index": index}
    return delta(tool_calls=[{**numbered, "id": id, "function": function}])


def thoughts(text: str) -> Json:
    return delta(reasoning_details=[{"type": "reasoning.text", "index": 0, "text": text}])


@dataclass(frozen=True)
class Kind:
    name: str
    begin: Callable[[int], list[Json]]
    """The pieces that come first, with a text of so many characters."""
    piece: Callable[[int], Json]
    family: str = "plain"

    def __str__(self) -> str:
        return self.name


def begun(n: int) -> list[Json]:
    return [call(name="f", arguments='{"a":"' + "x" * n)]


def numbered(n: int) -> Json:
    return {f"key{number}": 1 for number in range(n // 20)}


KINDS = (
    Kind(
        "white space after text",
        lambda n: [delta(content="x" + "\n" * n)],
        lambda i: delta(content="\n"),
    ),
    Kind(
        "a call in the text",
        lambda n: [delta(content='<tool_call>{"name": "f", "arguments": {"a": "' + "x" * n)],
        lambda i: delta(content="x"),
    ),
    Kind("arguments with other ids", begun, lambda i: call(id=f"i{i}", arguments="}")),
    Kind(
        "arguments as objects",
        lambda n: [call(name="f", arguments=numbered(n))],
        lambda i: call(name="f", arguments={}),
    ),
    Kind("a name", lambda n: [call(name="f" * n)], lambda i: call(name="g")),
    Kind(
        "extra content",
        lambda n: [
            delta(
                tool_calls=[{"index": 0, "extra_content": numbered(n), "function": {"name": "f"}}]
            )
        ],
        lambda i: delta(tool_calls=[{"index": 0, "extra_content": {f"a{i}": 1}}]),
    ),
    Kind("details of thoughts", lambda n: [thoughts("x" * n)], lambda i: thoughts("x")),
    Kind(
        "details of other types",
        lambda n: [delta(reasoning_details=[{"type": f"t{i}"} for i in range(n // 20)])],
        lambda i: delta(reasoning_details=[{"type": f"s{i}"}]),
    ),
    Kind(
        "thoughts that the text repeats",
        lambda n: [delta(reasoning_content="x" * n), delta(content="<think>")],
        lambda i: delta(content="x"),
        "qwen3",
    ),
)


def seconds(kind: Kind, size: int) -> float:
    reader = AnswerReader(
        ReadingOptions(
            family=text_family(kind.family),
            opening=opening_of_reasoning(kind.family),
            context=ParseContext(tools=TOOLS, holds_calls=True),
        )
    )

    def feed(value: Json) -> None:
        for part in reader.parts(read_piece(value)):
            for _ in reader.feed(part):
                pass

    for value in kind.begin(size):
        feed(value)
    pieces = [kind.piece(number) for number in range(PIECES)]
    gc.collect()
    gc.disable()
    began = time.thread_time()
    try:
        for value in pieces:
            feed(value)
        return time.thread_time() - began
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_piece_takes_as_long_after_much_as_after_little(kind: Kind) -> None:
    assert least(seconds, kind, MUCH) < MOST * least(seconds, kind, LITTLE)


def least(work: Callable[..., float], *arguments: Any) -> float:
    """The least of three times, since others use the processor too."""
    return min(work(*arguments) for _ in range(3))


def events(stream: bytes) -> float:
    reader, began = SseReader(), time.thread_time()
    for at in range(0, len(stream), 4096):
        reader.feed(stream[at : at + 4096])
    return time.thread_time() - began


def reason(text: bytes) -> float:
    began = time.thread_time()
    reason_of_end(text.decode())
    return time.thread_time() - began


@pytest.mark.parametrize(
    ("work", "unit"),
    [
        (events, b"\n"),
        (events, b"\r"),
        (events, b": a comment\n"),
        (events, b"data:"),
        (events, b"data:\n"),
        (events, b"data: 1\n"),
        (reason, b"max_"),
    ],
    ids=lambda value: repr(value) if isinstance(value, bytes) else value.__name__,
)
def test_four_times_as_much_takes_about_four_times_as_long(
    work: Callable[[bytes], float], unit: bytes
) -> None:
    few, many = (unit * (size // len(unit)) for size in (50_000, 200_000))
    assert least(work, many) < 10 * least(work, few) + 0.001
