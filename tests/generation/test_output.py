"""The tokens of a row become text, log probabilities and an end."""

from dataclasses import replace
from threading import get_ident

import pytest

from mlx_server.engine.messages import Logprobs, Prefilled, PromptLogprobs
from mlx_server.events import Event, Finished, TextDelta
from mlx_server.generation.generate import generate
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.prepare import ModelSpec
from tests.generation.scripted import (
    ASKED,
    END,
    FIRST,
    VOCABULARY,
    admitted,
    answered,
    byte_id,
    finished,
    pooled,
    run,
    said,
    text_of,
)


def test_a_stop_string_across_tokens_ends_the_row_at_once(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("yes</b> and more")
    assert len(tokenizer.encode("</b>")) > 1
    pool, engine = pooled(spec, admitted(), said(ids[:5]), said(ids[5:]))
    request = replace(ASKED, stop=("</b>",))

    async def test() -> list[Event]:
        events = []
        async for event in generate(request, pool):
            events.append(event)
            if isinstance(event, Finished):
                # `n` answers: the others go on, so this one must not wait for the end
                assert not engine.done
        return events

    events = run(pool, test())
    assert text_of(events) == "yes"
    tokens = len(tokenizer.encode("yes</b>"))
    (end,) = finished(events)
    assert end == Finished(0, "stop", tokens, 0, text_tokens=tokens, stop_string="</b>")
    assert engine.cancelled == [FIRST]


def test_a_row_that_met_its_stop_string_is_cancelled_while_others_go_on(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    more = said(tokenizer.encode("no stop"), 1)
    pool, engine = pooled(
        spec,
        [*admitted(0, 1), *said(tokenizer.encode("a."), 0), *more[:1]],
        [*said(tokenizer.encode("late"), 0), *more[1:]],
        said(END, 1, "stop"),
    )
    cancelled: list[list[int]] = []

    async def test() -> list[Event]:
        events = []
        async for event in generate(replace(ASKED, n=2, stop=(".",)), pool):
            events.append(event)
            cancelled.append(list(engine.cancelled))
        return events

    events = run(pool, test())
    assert (text_of(events, 0), text_of(events, 1)) == ("a", "no stop")
    assert [event.index for event in finished(events)] == [0, 1]
    assert cancelled[-1] == [FIRST]


def test_what_a_stop_string_might_have_been_is_told_at_the_end(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("yes</")
    events, _ = answered(
        spec, replace(ASKED, stop=("</b>",)), admitted(), said(ids, finish="length")
    )
    assert text_of(events) == "yes</"
    assert finished(events) == [Finished(0, "length", len(ids), 0, text_tokens=len(ids))]


def test_characters_in_several_tokens_come_whole(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    ids = [byte_id(tokenizer, byte) for byte in "é🙂".encode()]
    events, _ = answered(
        spec,
        replace(ASKED, logprobs=0),
        admitted(),
        *(said([id], logprobs=Logprobs(-1.0, [])) for id in ids),
        said(END, finish="stop"),
    )
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [delta.text for delta in deltas] == ["é", "🙂"]
    assert [len(delta.logprobs) for delta in deltas] == [2, 4]
    assert b"".join(entry.bytes for d in deltas for entry in d.logprobs) == "é🙂".encode()


def test_an_answer_that_ends_inside_a_character_has_no_piece_of_it(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    ids = [byte_id(tokenizer, byte) for byte in "a🙂".encode()[:3]]
    asked = replace(ASKED, logprobs=0)
    report = said(ids, finish="length", logprobs=Logprobs(-1.0, []))
    events, _ = answered(spec, asked, admitted(), report)
    assert text_of(events) == "a"
    entries = [e for d in events if isinstance(d, TextDelta) for e in d.logprobs]
    assert b"".join(entry.bytes for entry in entries) == "a🙂".encode()[:3]


def test_every_tokens_logprob_is_told_also_of_those_without_text(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    silent = tokenizer.encode("<|im_start|>")
    ids = [*silent, *tokenizer.encode("ab"), *silent, *tokenizer.encode("c"), *silent, *silent]
    events, _ = answered(
        spec,
        replace(ASKED, logprobs=0, stop=("cd",)),
        admitted(),
        said(ids, logprobs=Logprobs(-0.5, [])),
        said(END, finish="stop", logprobs=Logprobs(-0.1, [])),
    )
    entries = [e for d in events if isinstance(d, TextDelta) for e in d.logprobs]
    assert [entry.token for entry in entries] == [tokenizer.spelling(id) for id in ids]
    assert text_of(events) == "abc"


def test_a_logprob_has_its_token_its_bytes_and_the_alternatives(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    a, b = byte_id(tokenizer, ord("a")), byte_id(tokenizer, 0xF0)
    found = Logprobs(-0.25, [(a, -0.25), (b, -1.5), (VOCABULARY - 1, -9.0)])
    events, _ = answered(
        spec, replace(ASKED, logprobs=3), admitted(), said([a], finish="length", logprobs=found)
    )
    [entry] = [e for d in events if isinstance(d, TextDelta) for e in d.logprobs]
    assert (entry.token, entry.bytes, entry.logprob) == ("a", b"a", -0.25)
    reported = [(top.token, top.bytes, top.logprob, top.top) for top in entry.top]
    assert reported == [("a", b"a", -0.25, ()), ("�", b"\xf0", -1.5, ()), ("", b"", -9.0, ())]


def test_an_echo_begins_each_answer(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    events, engine = answered(
        spec,
        replace(ASKED, prompts=("One two", "Three"), echo=True, stop=("e",)),
        admitted(0, 1),
        [*said(tokenizer.encode(" yes"), 0), *said(END, 1, "stop")],
    )
    # a stop string ends an answer, not its prompt
    assert (text_of(events, 0), text_of(events, 1)) == ("One two y", "Three")
    assert [row.prompt_logprobs for row in engine.rows] == [False, False]


def test_a_prompts_log_probabilities_keep_no_other_stream_waiting(
    spec: ModelSpec, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens are converted to text at once as the prompt has, and 20 times as many."""
    threads = set[int]()
    spelling = Tokenizer.spelling

    def observed(tokenizer: Tokenizer, token: int) -> str:
        threads.add(get_ident())
        return spelling(tokenizer, token)

    monkeypatch.setattr(Tokenizer, "spelling", observed)
    prompt = tokenizer.encode("Hello")
    asked = replace(ASKED, prompts=(tuple(prompt),), echo=True, logprobs=1, max_tokens=0)
    scored = PromptLogprobs(FIRST, [Logprobs(-1.0, [(5, -0.1)])] * (len(prompt) - 1))
    answered(spec, asked, [*admitted(), scored])
    assert threads
    assert get_ident() not in threads


def test_what_was_cached_of_the_prompt_is_told_at_the_end(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    events, _ = answered(
        spec,
        replace(ASKED, n=2),
        [*admitted(0, 1), Prefilled(FIRST, 3)],
        [*said(tokenizer.encode("a"), 0, "length"), Prefilled(FIRST + 1, 4)],
        said(END, 1, "stop"),
    )
    assert [(event.index, event.cached_tokens) for event in finished(events)] == [(0, 3), (1, 4)]
