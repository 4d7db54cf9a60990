"""The commands that a step takes, and what ends the waiting for them."""

import queue
from concurrent.futures import Future

import pytest

from mlx_server.engine.messages import CancelRows, UnloadModel, encode_commands
from mlx_server.worker.server_connection import END, Inbox, OwnInputs


def test_all_commands_that_have_come_are_taken_in_their_order() -> None:
    inbox: Inbox = queue.SimpleQueue()
    inputs = OwnInputs(inbox)
    inbox.put(encode_commands([CancelRows([1]), UnloadModel("m")]))
    inputs.wake()
    inbox.put(encode_commands([CancelRows([2])]))
    assert inputs.take(0) == [CancelRows([1]), UnloadModel("m"), CancelRows([2])]
    assert inputs.take(0) == []


@pytest.mark.parametrize("pause", [None, 60.0])
def test_a_task_that_has_finished_ends_the_waiting(pause: float | None) -> None:
    inputs = OwnInputs(queue.SimpleQueue())
    inputs.wake()
    assert inputs.take(pause) == []


def test_no_command_comes_within_the_pause() -> None:
    assert OwnInputs(queue.SimpleQueue()).take(0.001) == []


def test_when_the_server_is_gone_its_last_commands_are_not_carried_out() -> None:
    inbox: Inbox = queue.SimpleQueue()
    inbox.put(encode_commands([CancelRows([1])]))
    inbox.put(END)
    with pytest.raises(EOFError):
        OwnInputs(inbox).take(None)


def test_a_task_is_done_when_it_has_a_result() -> None:
    task: Future[int] = Future()
    inputs = OwnInputs(queue.SimpleQueue())
    assert not inputs.is_done(task)
    task.set_result(1)
    assert inputs.is_done(task)
