"""The tokens of a row become text, log probabilities and an end."""

from dataclasses import replace
from threading import get_ident

import pytest

from mlx_server.engine.messages import Logprobs, PromptLogprobs
from mlx_server.events import Event, Finished
from mlx_server.generation.generate import generate
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.prepare import ModelSpec
from tests.generation.scripted import (
    ASKED,
    END,
    FIRST,
    admitted,
    answered,
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
