"""What models wrote, read without a server."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_server.errors import BadRequest
from mlx_server.events import Event, Finished, TextDelta, TokenCounts
from mlx_server.families import AS_TEXT, FAMILIES
from mlx_server.prompts.harmony.vocabulary import encoding
from mlx_server.reading import OutputReader, as_tool, read
from tests.families.goldens import Reads, folded, goldens_of, outputs_of, shown, tools
from tests.tables import cases

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HARMONY = (
    "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)


def reads(events: Sequence[Event]) -> Reads:
    return folded(events, [as_tool(WEATHER)])


def same(events: Sequence[Event]) -> str:
    """Without the ids of calls, which are new each time."""
    return shown(reads(events), Reads())


def harmony_ids(text: str) -> list[int]:
    ids: list[int] = encoding().encode(text, allowed_special="all")
    return ids


def test_it_needs_neither_mlx_nor_a_web_framework() -> None:
    """Nor does the package cost anything before it is used."""
    code = (
        "import sys, mlx_server\n"
        "assert len([m for m in sys.modules if m.startswith('mlx_server')]) == 1\n"
        "print(len(mlx_server.read('<think>Why?</think>Yes.', 'qwen3')))\n"
        "unwanted = {'mlx', 'mlx_lm', 'fastapi', 'starlette', 'uvicorn', 'llguidance', 'torch'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert printed.stdout.split() == ["3", "[]"]


@pytest.mark.parametrize("family", [each.name for each in FAMILIES if each.name not in AS_TEXT])
def test_the_first_golden_case_of_each_family_reads_as_in_the_server(family: str) -> None:
    (named,) = (each for each in FAMILIES if each.name == family)
    case = next(each for each in goldens_of(named) if each.by_text)
    assert outputs_of(named).is_file()
    events = read(case.output, family, tools(), prompt_end=case.prompt_end, cut=case.cut)
    found = folded(events[:-1])
    assert (found.text, found.reasoning) == (case.reads.text, case.reads.reasoning)
    assert [call.name for call in found.calls] == [call.name for call in case.reads.calls]


def test_harmony_reads_the_same_from_token_ids_and_from_text() -> None:
    events = read(HARMONY, "gpt_oss", [WEATHER])
    assert same(events) == same(read(harmony_ids(HARMONY), "gpt_oss", [WEATHER]))
    assert reads(events).reasoning == "I should look."
    assert [call.arguments for call in reads(events).calls] == [{"city": "Paris"}]


def test_token_ids_are_counted_and_those_of_other_families_need_a_tokenizer() -> None:
    ids = harmony_ids("<|channel|>final<|message|>Yes.<|return|>")
    assert read(ids, "gpt_oss")[-1] == Finished(0, "stop", TokenCounts(len(ids)))
    with pytest.raises(BadRequest, match=r"tokenizer\.json"):
        read([1, 2], "qwen3")


def test_an_answer_reads_the_same_however_it_is_cut() -> None:
    whole = read(HARMONY, "gpt_oss", [WEATHER])
    for size in (1, 3, 7):
        reader = OutputReader("gpt_oss", [WEATHER])
        pieces = [HARMONY[at : at + size] for at in range(0, len(HARMONY), size)]
        events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
        assert same(events) == same(whole)


@cases
def test_the_last_event_says_how_it_ended(output: str, cut: bool, reason: str) -> None:
    last = read(output, "gpt_oss", [WEATHER], cut=cut)[-1]
    assert isinstance(last, Finished)
    assert last.reason == reason


@pytest.mark.parametrize("rest", ['"Pa', '"Paris" or so}}\n</tool_call>'])
def test_a_call_is_reported_only_once_it_is_complete(rest: str) -> None:
    reader = OutputReader("qwen3", [WEATHER])
    events = reader.feed('<tool_call>\n{"name": "get_weather", "arguments": {"city": ' + rest)
    events += reader.finish(cut=True)
    assert reads(events).unfinished == []


def test_what_was_not_offered_is_text() -> None:
    events = read('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "qwen3")
    assert "".join(e.text for e in events if isinstance(e, TextDelta)).startswith("<tool_call>")
