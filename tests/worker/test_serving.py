"""An engine's steps are repeated until its server is gone or its device has failed."""

from typing import Any, cast

from mlx_server.engine.messages import CancelRows, Command
from mlx_server.worker.engine import run_steps
from mlx_server.worker.server_connection import HeartbeatMonitor


class Engine:
    """Reports what a test says in each step."""

    pause: float | None = None
    warm = broken = False
    doing = "resting"

    def __init__(self, *steps: list[Any], breaks_after: int | None = None) -> None:
        self.steps, self.taken = list(steps), list[Command]()
        self._breaks_after = breaks_after

    def handle(self, command: Command) -> list[Any]:
        self.taken.append(command)
        return ["handled"]

    def step(self) -> list[Any]:
        found = self.steps.pop(0)
        self.broken = self._breaks_after is not None and len(self.steps) <= self._breaks_after
        return found


class Given:
    """The server is gone after these commands."""

    def __init__(self, *commands: list[Command]) -> None:
        self.commands = list(commands)

    def take(self, pause: float | None) -> list[Command]:
        if not self.commands:
            raise EOFError
        return self.commands.pop(0)


def sent(engine: Engine, *commands: list[Command]) -> list[tuple[Any, ...]]:
    frames: list[tuple[Any, ...]] = []
    run_steps(
        cast(Any, engine),
        HeartbeatMonitor(),
        cast(Any, Given(*commands)),
        lambda *r: frames.append(r),
    )
    return frames


def test_a_step_is_one_frame_and_a_silent_step_is_none() -> None:
    cancel = CancelRows([1])
    engine = Engine(["a", "b"], [], ["c"])
    assert sent(engine, [cancel, cancel], [], []) == [("handled", "handled", "a", "b"), ("c",)]
    assert engine.taken == [cancel, cancel]


def test_the_last_reports_of_a_broken_engine_are_sent_and_nothing_is_taken_after() -> None:
    engine = Engine(["lost"], ["never"], breaks_after=1)
    assert sent(engine, [], [CancelRows([1])]) == [("lost",)]
    assert engine.taken == []
