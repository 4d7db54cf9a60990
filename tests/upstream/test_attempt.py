"""One request to an upstream, or two, and the events of what it sends."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar

import pytest

from mlx_server.errors import ServerError, UpstreamFailed
from mlx_server.events import Event, Finished, ReasoningDelta, TextDelta
from mlx_server.families import family_named
from mlx_server.generation.upstream import LARGE, UpstreamAttempt
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.upstream.connection import UpstreamConnection
from mlx_server.upstream.dialects import CHAT
from mlx_server.upstream.pieces import CHARACTERS_PER_TOKEN
from mlx_server.upstream.reading import AnswerReader, ReadingOptions
from mlx_server.upstream.request import LimitedThoughts, UpstreamRequest
from mlx_server.upstream.responses import Allowance
from mlx_server.upstream.text_families import ThoughtTags
from tests.upstream.entries import spec
from tests.upstream.playing import USAGE, Json, PlayingServer, Reply, delta, says, streamed

BODY: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
TAGS = ThoughtTags("<think>", "</think>")
CUT = streamed(delta(content="<think>Hm."), delta("length"), USAGE)


@pytest.fixture
def connection(tmp_path: Path, upstream: PlayingServer) -> UpstreamConnection:
    return UpstreamConnection("up", spec(tmp_path, f"source: openai+{upstream.url}/v1"))


class NotingReader(AnswerReader):
    """Notes in which thread the last events are made."""

    threads: ClassVar[list[int]] = []

    def finish(self) -> Iterator[Event]:
        self.threads.append(get_ident())
        yield from super().finish()


def reader(**options: Any) -> AnswerReader:
    found = ReadingOptions(family_named("qwen3"), "<think>", ParseContext(holds_calls=True))
    return NotingReader(replace(found, **options))


def limited(budget: int) -> UpstreamRequest:
    return UpstreamRequest(CHAT, BODY, LimitedThoughts(BODY, TAGS, budget, "max_tokens"))


def answered(
    connection: UpstreamConnection, request: UpstreamRequest | None = None, **options: Any
) -> list[Event]:
    async def ask() -> list[Event]:
        allowance = Allowance(60)
        try:
            begun = await UpstreamAttempt.begun(
                connection,
                request or UpstreamRequest(CHAT, BODY),
                reader(**options),
                allowance,
            )
            events: list[Event] = []
            async with aclosing(begun):
                while (more := await begun.take()) is not None:
                    events += more
            return events
        finally:
            allowance.release()
            await connection.aclose()

    return asyncio.run(asyncio.wait_for(ask(), 10))


def content(events: list[Event]) -> Iterator[tuple[str, str]]:
    for kind, name in ((ReasoningDelta, "reasoning"), (TextDelta, "text")):
        yield name, "".join(each.text for each in events if isinstance(each, kind)).strip()


def test_one_request_has_one_answer_that_is_finished(
    connection: UpstreamConnection, upstream: PlayingServer
) -> None:
    upstream.plays(says("Yes."))
    events = answered(connection)
    assert [type(event) for event in events] == [TextDelta, Finished]
    assert upstream.bodies == [{**BODY, "stream": True}]
    assert connection.running == 0


@pytest.mark.parametrize(
    "said",
    [
        {"content": "<think>" + "x" * LARGE},
        {"reasoning_details": [{"type": "a", "data": "x" * LARGE}]},
        {"tool_calls": [{"index": 0, "extra_content": {"a": "x" * LARGE}}]},
    ],
    ids=lambda said: next(iter(said)),
)
def test_a_large_end_is_made_outside_of_the_loop(
    connection: UpstreamConnection, upstream: PlayingServer, said: Json
) -> None:
    upstream.plays(says("Yes."), streamed(delta(**said), delta("stop"), USAGE))
    for is_outside in (False, True):
        NotingReader.threads.clear()
        answered(connection)
        assert [thread != get_ident() for thread in NotingReader.threads] == [is_outside]


@pytest.mark.parametrize("budget", [5, 0])
def test_thoughts_with_a_budget_take_a_second_request_for_the_answer(
    connection: UpstreamConnection, upstream: PlayingServer, budget: int
) -> None:
    upstream.plays(*([CUT] if budget else []), says("Yes."))
    events = answered(connection, limited(budget))
    assert dict(content(events)) == {"reasoning": "Hm." if budget else "", "text": "Yes."}
    assert sum(isinstance(event, Finished) for event in events) == 1
    assert len(upstream.bodies) == (2 if budget else 1)
    begun = upstream.bodies[-1]["messages"][-1]
    assert (begun["role"], begun["content"].split()[0]) == (
        "assistant",
        "<think>" + "Hm." * (budget > 0),
    )


@pytest.mark.parametrize(
    "first",
    [
        says("<think>Hm.</think>Yes."),
        says("Yes."),
        streamed(delta("length", content="Yes!")),
    ],
    ids=["thought and answered", "answered", "stopped"],
)
def test_a_first_request_that_answers_needs_no_second_one(
    connection: UpstreamConnection, upstream: PlayingServer, first: Reply
) -> None:
    upstream.plays(first, says("Never."))
    events = answered(connection, limited(5), stops=("!",))
    assert dict(content(events))["text"].startswith("Yes")
    assert len(upstream.bodies) == 1


@pytest.mark.parametrize(
    "reply",
    [
        streamed(delta(content="Ye"), done=False),
        streamed(delta(content="Ye"), USAGE, done=False),
        streamed(USAGE),
        streamed({"choices": []}),
    ],
    ids=["no end", "usage and no end", "usage alone", "no choice"],
)
def test_a_stream_that_ends_before_its_answer_is_a_failure(
    connection: UpstreamConnection, upstream: PlayingServer, reply: Reply
) -> None:
    upstream.plays(reply)
    with pytest.raises(UpstreamFailed, match="of up ended its stream before the answer"):
        answered(connection)
    assert connection.running == 0


@pytest.mark.parametrize(
    "reply",
    [streamed(delta(content="Yes.")), streamed(delta("stop", content="Yes."), done=False)],
    ids=["end without a reason", "reason without an end"],
)
def test_either_a_finish_reason_or_the_streams_end_completes_an_answer(
    connection: UpstreamConnection, upstream: PlayingServer, reply: Reply
) -> None:
    upstream.plays(reply)
    assert dict(content(answered(connection)))["text"] == "Yes."


@pytest.mark.parametrize("name", ["content", "reasoning_content", "tool_calls"])
def test_an_answer_that_repeats_itself_is_ended(
    connection: UpstreamConnection, upstream: PlayingServer, name: str
) -> None:
    line = "I think that is all there is to say about it, my friend. "
    call = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": line}}]
    said: Json = {name: call if name == "tool_calls" else line}
    piece = delta(None, **said)
    upstream.plays(streamed(*[piece] * 2_000, delta("length"), USAGE))
    events = answered(connection)
    if name != "tool_calls":
        text = "".join(dict(content(events)).values())
        assert 100 < len(text) / len(line) < 130
    assert isinstance(end := events[-1], Finished)
    assert end.reason == "stop"
    assert "it repeated the same 15 words, so it was ended" in str(events)
    assert connection.running == 0


def test_without_any_thoughts_an_answer_that_was_cut_is_not_asked_for_again(
    connection: UpstreamConnection, upstream: PlayingServer
) -> None:
    upstream.plays(streamed(delta("length", content="Ye")), says("Never."))
    assert dict(content(answered(connection, limited(0))))["text"] == "Ye"
    assert len(upstream.bodies) == 1


def test_a_stop_string_ends_the_upstreams_work(
    connection: UpstreamConnection, upstream: PlayingServer
) -> None:
    upstream.plays(replace(streamed(delta(content="Yes! No"), done=False), endless=True))
    events = answered(connection, stops=("!",), family=family_named("llama3"))
    assert dict(content(events))["text"] == "Yes"
    assert upstream.left.wait(10)


def test_an_answer_that_does_not_begin_is_an_error_before_any_event(
    connection: UpstreamConnection, upstream: PlayingServer
) -> None:
    upstream.plays(Reply(status=400))
    with pytest.raises(ServerError):
        answered(connection)


def test_who_leaves_ends_the_upstreams_work(
    connection: UpstreamConnection, upstream: PlayingServer
) -> None:
    upstream.plays(replace(streamed(delta(content="Yes"), done=False), endless=True))

    async def leave() -> None:
        allowance = Allowance(60)
        begun = await UpstreamAttempt.begun(
            connection,
            UpstreamRequest(CHAT, BODY),
            reader(family=family_named("llama3")),
            allowance,
        )
        async with aclosing(begun):
            assert await begun.take()
            assert connection.running == 1
        assert await asyncio.to_thread(upstream.left.wait, 10)
        allowance.release()
        await connection.aclose()

    asyncio.run(leave())
    assert connection.running == 0


def test_a_prompt_is_estimated_by_its_messages_prompt_and_tools(
    connection: UpstreamConnection,
) -> None:
    def estimated(**body: Any) -> int:
        request = UpstreamRequest(CHAT, body)
        return UpstreamAttempt(
            connection,
            request,
            None,  # type: ignore[arg-type]
            reader(),
            Allowance(60),
        ).estimated_prompt_tokens

    nothing = estimated(model="m" * 1000)
    assert nothing <= 5
    text = "word" * 100
    for body in ({"messages": [{"content": text}]}, {"prompt": text}, {"tools": text}):
        found = estimated(**body) - nothing
        assert abs(found - len(text) / CHARACTERS_PER_TOKEN) <= 4
    seen = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": text * 99}}]
    assert estimated(messages=[{"content": seen}]) - nothing < 2 * len(text) / CHARACTERS_PER_TOKEN
