import msgspec
import pytest

from mlx_server.api.accumulator import arguments_object
from mlx_server.api.ollama import OllamaOutput, chat_shape, line
from mlx_server.events import Finished, Started, TokenCounts, ToolCallDelta, ToolCallFinished
from mlx_server.events import ToolCallStarted as Called
from tests.api.folding import body_of, chunks_of


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": ', {}),
        ("[1]", {}),
        ("[" * 100_000, {}),
        ('{"a": ' * 100_000, {}),
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        (r'{"a\ud83d": ["\udc00x"]}', {"a?": ["?x"]}),
        ('{"a": %s}' % ("9" * 5000), {}),
        ('{"a": %s}' % ("9" * 50), {"a": int("9" * 50)}),
    ],
)
def test_arguments_can_always_be_sent(text: str, found: object) -> None:
    assert arguments_object(text) == found
    assert msgspec.json.encode(arguments_object(text))


def test_half_a_surrogate_pair_is_no_error_of_ollama_s_routes() -> None:
    calling = (
        Started("m", 3),
        Called(0, 0, "c", "f"),
        ToolCallDelta(0, 0, r'{"a": "\ud83d"}'),
        ToolCallFinished(0, 0),
        Finished(0, "tool_calls", TokenCounts(completion_tokens=5)),
    )
    answer = body_of(OllamaOutput(model="m", shape=chat_shape), calling)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "f", "arguments": {"a": "?"}}
    for chunk in chunks_of(OllamaOutput(model="m", shape=chat_shape), calling):
        assert line(chunk)


def test_ollamas_calls_are_numbered() -> None:
    twice = [
        event
        for call in range(2)
        for event in (Called(0, call, f"c{call}", "f"), ToolCallFinished(0, call))
    ]
    calling = (Started("m", 3), *twice, Finished(0, "tool_calls", TokenCounts()))
    whole = body_of(OllamaOutput(model="m", shape=chat_shape), calling)["message"]["tool_calls"]
    chunks = chunks_of(OllamaOutput(model="m", shape=chat_shape), calling)
    streamed = [call for chunk in chunks for call in chunk["message"].get("tool_calls", ())]
    assert streamed == whole
    assert [call["function"]["index"] for call in whole] == [0, 1]
