"""What events become: a response and its stream, whatever the model does."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlx_server.api.responses.answer import ResponseOutput
from mlx_server.api.responses.items import read_items
from mlx_server.api.responses.protocol import ResponsesBody, new_response
from mlx_server.api.responses.runs import Run
from mlx_server.errors import BadRequest, EngineDied
from mlx_server.events import (
    ApprovalRequested,
    Event,
    Finished,
    ListedTool,
    McpCallDelta,
    McpCallFinished,
    McpCallReady,
    McpCallStarted,
    ReasoningDelta,
    Repaired,
    Started,
    TextDelta,
    TokenCounts,
    TokenLogprob,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    ToolsListed,
)
from mlx_server.http.security import Signer
from mlx_server.requests import SamplingParams
from mlx_server.store import Record
from tests.api.folding import body_of, on_the_wire
from tests.api.responses_schema import Json, assert_stream, timeless
from tests.tables import cases

STARTED = Started("tiny", 7)
STOPPED = Finished(0, "stop", TokenCounts(5, cached_tokens=3, reasoning_tokens=2))
CUT = Finished(0, "length", TokenCounts(5))
CALLED = Finished(0, "tool_calls", TokenCounts(5))

TOKEN = TokenLogprob(
    "He", b"He", -0.5, (TokenLogprob("He", b"He", -0.5), TokenLogprob("H", b"H", -2))
)


def thought(*pieces: str) -> list[Event]:
    return [ReasoningDelta(0, piece) for piece in pieces]


def said(*pieces: str) -> list[Event]:
    return [TextDelta(0, piece) for piece in pieces]


def called(call: int, *arguments: str, ends: bool = True) -> list[Event]:
    end: list[Event] = [ToolCallFinished(0, call)] if ends else []
    pieces: list[Event] = [ToolCallDelta(0, call, piece) for piece in arguments]
    return [ToolCallStarted(0, call, f"call_{call}", "f"), *pieces, *end]


ANSWERS: dict[str, list[Event]] = {
    "text": [*said("Hel", "lo"), STOPPED],
    "nothing": [STOPPED],
    "nothing, cut": [CUT],
    "reasoning and text": [*thought("I ", "think"), *said("so"), STOPPED],
    "only reasoning": [*thought("hm"), STOPPED],
    "reasoning, cut": [*thought("hm"), CUT],
    "text, cut": [*said("Hel"), CUT],
    "reasoning between texts": [*said("a"), *thought("b"), *said("c"), STOPPED],
    "reasoning of nothing": [*thought(""), *said("a"), STOPPED],
    "empty pieces": [*thought("", "a", ""), *said("", "b", ""), STOPPED],
    "a call": [*thought("b"), *called(0, '{"a":', "1}"), CALLED],
    "a call without arguments": [*called(0), CALLED],
    "text and calls": [*said("a"), *called(0, "{}"), *called(1, "{}"), CALLED],
    "calls side by side": [
        ToolCallStarted(0, 0, "x", "f"),
        ToolCallStarted(0, 1, "y", "g"),
        ToolCallDelta(0, 1, "{}"),
        ToolCallDelta(0, 0, "{}"),
        ToolCallFinished(0, 1),
        ToolCallFinished(0, 0),
        CALLED,
    ],
    "text between calls": [*called(0, "{}"), *said("and"), *called(1, "{}"), CALLED],
    "a call, cut": [*called(0, '{"a', ends=False), CUT],
    "a call that was none": [*called(0, '{"a', ends=False), *said("rather not"), STOPPED],
    "log probabilities": [
        TextDelta(0, "He", (TOKEN,)),
        TextDelta(0, "llo", (TOKEN, TOKEN)),
        TextDelta(0, "", (TOKEN,)),
        STOPPED,
    ],
    "log probabilities of no text": [TextDelta(0, "", (TOKEN,)), STOPPED],
    "phases": [
        *said("a"),
        TextDelta(0, "b", phase="commentary"),
        TextDelta(0, "", (TOKEN,)),
        TextDelta(0, "c", phase="final_answer"),
        *said("d"),
        STOPPED,
    ],
    "mended": [Repaired(0, "json", "tool_calls[0].function.arguments"), *said("a"), STOPPED],
}

LISTED = ToolsListed(
    0, "docs", (ListedTool("find", "Finds", {"type": "object"}, {"readOnlyHint": True}),)
)


def mcp(call: int, output: str | None, error: str | None = None) -> list[Event]:
    return [
        McpCallStarted(0, call, f"c{call}", "docs", "find"),
        McpCallDelta(0, call, '{"a"'),
        McpCallDelta(0, call, ":1}"),
        McpCallReady(0, call),
        McpCallFinished(0, call, output, error),
    ]


WITH_MCP: dict[str, list[Event]] = {
    "a round": [LISTED, *thought("hm"), *mcp(0, "found"), *said("there"), STOPPED],
    "no list": [ToolsListed(0, "docs", error="It is gone."), *said("well"), STOPPED],
    "part of a list": [replace(LISTED, error="One has no name."), *said("well"), STOPPED],
    "a failed call": [LISTED, *mcp(0, None, "No."), *said("well"), STOPPED],
    "nothing after a call": [LISTED, *mcp(0, "found"), STOPPED],
    "cut in a call": [LISTED, *mcp(0, None)[:2], CUT],
    "cut before it ran": [LISTED, *mcp(0, None)[:4], CUT],
    "parallel": [
        McpCallStarted(0, 0, "a", "docs", "find"),
        McpCallStarted(0, 1, "b", "docs", "find", approval="mcpr_1"),
        McpCallDelta(0, 1, "{}"),
        McpCallDelta(0, 0, "{}"),
        McpCallReady(0, 0),
        McpCallReady(0, 1),
        McpCallFinished(0, 1, "second"),
        McpCallFinished(0, 0, "first"),
        *said("both"),
        STOPPED,
    ],
    "an approval": [
        LISTED,
        *said("May I?"),
        ApprovalRequested(0, 0, "mcpr_1", "docs", "find", "{}"),
        CALLED,
    ],
}


SIGNER = Signer(b"a key")


async def _told(events: Sequence[Event], failure: Exception | None = None) -> AsyncGenerator[Event]:
    for event in [STARTED, *events]:
        yield event
    if failure:
        raise failure


def output(**asked: Any) -> ResponseOutput:
    body = ResponsesBody.model_validate({"model": "tiny", "input": "hi", **asked})
    return ResponseOutput(
        new_response(body, "resp_1", stored=False),
        seal=SIGNER.seal if body.encrypts else None,
        summarizes=body.summary is not None,
    )


def streamed(events: Sequence[Event], failure: Exception | None = None, **asked: Any) -> list[Json]:
    return asyncio.run(_chunks(output(**asked), _told(events, failure)))


async def _chunks(made: ResponseOutput, events: AsyncGenerator[Event]) -> list[Json]:
    run = Run(Record("response", "resp_1", 0.0, b""), "", made, lambda: events)
    await run.begin()
    return [on_the_wire(chunk) async for chunk in run.chunks()]


def gathered(events: Sequence[Event], **asked: Any) -> Json:
    return body_of(output(**asked), [STARTED, *events])


def shape(response: Json) -> list[tuple[str, str]]:
    return [(item["type"], item.get("status", "")) for item in response["output"]]


ALL = ANSWERS | WITH_MCP


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_response_is_what_was_streamed_and_can_be_sent_back(name: str) -> None:
    response = assert_stream(streamed(ALL[name]), is_open=name in ANSWERS)
    whole = gathered(ALL[name])
    assert timeless(whole) == timeless(response)
    items = whole["output"]
    assert [item.id for item in read_items(items)] == [item["id"] for item in items]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_an_error_ends_it_wherever_it_comes(name: str) -> None:
    for length in range(len(ALL[name])):
        events = streamed(ALL[name][:length], EngineDied("It died."))
        response = assert_stream(events, is_open=name in ANSWERS)
        error, last = events[-2:]
        assert (error["type"], last["type"]) == ("error", "response.failed")
        assert (response["status"], response["usage"]) == ("failed", None)
        assert response["error"]["message"] == error["message"]
        assert "in_progress" not in {status for _, status in shape(response)}


def test_an_error_tells_what_is_known_of_it() -> None:
    error, last = streamed(said("a"), EngineDied("It died."))[-2:]
    assert (error["code"], error["message"], error["param"]) == ("engine_died", "It died.", None)
    assert last["response"]["error"] == {"code": "server_error", "message": "It died."}
    *_, last = streamed([], BadRequest("Too long.", param="input"))
    assert last["response"]["error"]["code"] == "invalid_prompt"


def test_an_error_of_ours_tells_nothing_of_us(caplog: pytest.LogCaptureFixture) -> None:
    events = streamed(said("a"), RuntimeError("secret"))
    assert "secret" not in str(events)
    assert "secret" in caplog.text


MESSAGE, CALL = ("message", "completed"), ("function_call", "completed")
CUT_SHORT = {"reason": "max_output_tokens"}


@cases
def test_items_come_as_they_were_made(answer: str, items: list[list[str]]) -> None:
    response = gathered(ANSWERS[answer])
    assert shape(response) == [tuple(item) for item in items]
    is_cut = answer.endswith(", cut")
    assert response["status"] == ("incomplete" if is_cut else "completed")
    assert response["incomplete_details"] == (CUT_SHORT if is_cut else None)
    assert (response["completed_at"] is None) == is_cut


def test_usage() -> None:
    more = {"accepted_draft_tokens": 3, "rejected_draft_tokens": 1, "further_prompt_tokens": 10}
    end = replace(STOPPED, counts=replace(STOPPED.counts, **more))
    assert gathered([*said("a"), end])["usage"] == {
        "input_tokens": 17,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {
            "reasoning_tokens": 2,
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 1,
        },
        "total_tokens": 22,
    }


def test_the_model_and_its_sampling_are_reported_from_the_first_event_on() -> None:
    started = Started("tiny:french", 1, sampling=SamplingParams(temperature=0.6, top_p=0.9))
    made = output(top_p=0.9)
    chunks = [chunk for event in (started, STOPPED) for chunk in made.chunks(event)]
    states = [chunk["response"] for chunk in chunks if "response" in chunk]
    assert [state["model"] for state in states] == ["tiny:french"] * 3
    assert {(state["temperature"], state["top_p"]) for state in states} == {(0.6, 0.9)}


def test_reasoning_is_sealed_for_those_who_ask() -> None:
    answer = [*thought("Grüezi, ", "世界"), *said("a"), STOPPED]
    (plain, _) = gathered(answer)["output"]
    assert "encrypted_content" not in plain
    assert plain["summary"] == []
    include = ["reasoning.encrypted_content"]
    (sealed, _) = assert_stream(streamed(answer, include=include))["output"]
    assert SIGNER.opened(sealed["encrypted_content"]) == "Grüezi, 世界"
    assert sealed["content"] == plain["content"]


def test_reasoning_is_its_own_summary_for_those_who_ask() -> None:
    answer = [*thought("Grüezi, ", "世界"), *said("a"), *thought("Und?"), *said("b"), STOPPED]
    chunks = streamed(answer, reasoning={"summary": "auto"})
    response = assert_stream(chunks, is_open=False)
    assert response["reasoning"]["summary"] == "auto"
    thoughts = [item for item in response["output"] if item["type"] == "reasoning"]
    for item, text in zip(thoughts, ["Grüezi, 世界", "Und?"], strict=True):
        assert item["summary"] == [{"type": "summary_text", "text": text}]
        assert item["content"] == [{"type": "reasoning_text", "text": text}]
    reported = [c["type"] for c in chunks if c.get("item_id") == thoughts[1]["id"]]
    summary, reasoning = "response.reasoning_summary_", "response.reasoning_text."
    assert reported == [
        "response.content_part.added",
        f"{summary}part.added",
        f"{reasoning}delta",
        f"{summary}text.delta",
        f"{summary}text.done",
        f"{summary}part.done",
        f"{reasoning}done",
        "response.content_part.done",
    ]
    assert timeless(gathered(answer, reasoning={"generate_summary": "auto"})) == timeless(response)


def test_remarks_come_at_the_end() -> None:
    remark = {"index": 0, "what": "json", "where": "tool_calls[0].function.arguments"}
    *before, last = streamed(ANSWERS["mended"])
    assert last["response"]["mlx_server"] == {"repairs": [remark], "unenforced": []}
    assert not any("mlx_server" in event.get("response", {}) for event in before)
    assert "mlx_server" not in gathered(ANSWERS["text"])


def test_log_probabilities() -> None:
    (item,) = gathered(ANSWERS["log probabilities"])["output"]
    (part,) = item["content"]
    assert len(part["logprobs"]) == 4
    assert part["logprobs"][0] == {
        "token": "He",
        "logprob": -0.5,
        "bytes": [72, 101],
        "top_logprobs": [
            {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
            {"token": "H", "logprob": -2, "bytes": [72]},
        ],
    }


def test_what_is_run_here_is_told_with_its_end() -> None:
    listed, _, made, _ = gathered(WITH_MCP["a round"])["output"]
    assert listed["tools"][0]["input_schema"] == {"type": "object"}
    assert (made["arguments"], made["output"], made["error"]) == ('{"a":1}', "found", None)
    _, failed, _ = gathered(WITH_MCP["a failed call"])["output"]
    assert (failed["status"], failed["output"]) == ("failed", None)
    assert failed["error"]["content"] == [{"type": "text", "text": "No."}]
    first, second, _ = gathered(WITH_MCP["parallel"])["output"]
    assert (first["output"], second["output"]) == ("first", "second")
    assert second["approval_request_id"] == "mcpr_1"
