"""What rank 0 reads, the other ranks read too."""

import queue
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

from mlx_server.engine.messages import StepOutput, Token
from mlx_server.worker.ranks.link import (
    CHECK_STEPS,
    Comparison,
    RecordedInputs,
    RepeatedInputs,
    TokenDigest,
    decode_input,
)
from mlx_server.worker.server_connection import Inbox, OwnInputs


def a_step(id: int, tokens: int = 2) -> StepOutput:
    return StepOutput("m", [Token(row, id + row) for row in range(tokens)], 0, 0, 0)


def a_pair() -> tuple[Inbox, RecordedInputs, RepeatedInputs]:
    inbox: Inbox = queue.SimpleQueue()
    recorded: queue.SimpleQueue[Any] = queue.SimpleQueue()
    first = RecordedInputs(OwnInputs(inbox), lambda each: recorded.put(decode_input(each)))
    return inbox, first, RepeatedInputs(recorded)


def test_a_task_has_ended_on_a_rank_when_it_has_on_rank_0() -> None:
    _, first, second = a_pair()
    early: Future[int] = Future()
    may_end, late = Event(), ThreadPoolExecutor(1)
    assert not first.is_done(early)
    early.set_result(1)
    assert first.is_done(early)
    task = late.submit(may_end.wait)
    assert not second.is_done(early), "rank 0 looked before it had ended"
    asked = ThreadPoolExecutor(1).submit(second.is_done, task)
    assert not asked.done()
    may_end.set()
    assert asked.result(10)
    assert task.done()


def test_digests_differ_where_a_token_does() -> None:
    steps = [a_step(i) for i in range(CHECK_STEPS)]
    same, other, longer = TokenDigest(), TokenDigest(), TokenDigest()
    due = [same.add([step]) for step in steps]
    assert due == [False] * (CHECK_STEPS - 1) + [True]
    steps[3].tokens[0].id += 1
    for step in steps:
        other.add([step])
        longer.add([a_step(0, tokens=0), step])
    assert same.value != other.value == longer.value
    assert longer.steps == same.steps, "a step without tokens is none"


def test_the_rank_that_differs_is_named_whichever_report_comes_first() -> None:
    digest = TokenDigest()
    digest.steps, digest.value = 16, 5
    early, late = Comparison(2), Comparison(2)
    assert early.reported(1, 16, 5) is None
    assert early.reported(2, 16, 6) is None
    assert early.own(digest) == 2
    assert late.own(digest) is None
    assert late.reported(2, 16, 5) is None
    assert late.reported(1, 16, 9) == 1
