"""What a failed GPU command says, by the texts that MLX and Metal really have."""

from mlx_server.engine.device_errors import ENDS, FORGIVEN_SECONDS, Streak, device_error, kind_of
from tests.tables import cases

FAILED = "[METAL] Command buffer execution failed: "


@cases
def test_a_command_buffer_that_failed(text: str, kind: str) -> None:
    assert kind_of(FAILED + text) == kind
    assert kind_of(f"RuntimeError: {FAILED}{text}.") == kind
    assert device_error(RuntimeError(FAILED + text)) == kind


@cases
def test_a_cuda_call_that_failed(text: str, kind: str | None) -> None:
    assert device_error(RuntimeError(text)) == kind


@cases
def test_other_errors(text: str, kind: str | None) -> None:
    assert kind_of(text) == kind


def test_errors_are_in_a_row_until_something_was_answered_and_time_has_passed() -> None:
    streak = Streak()
    assert streak.failed(0.0) == 1
    assert streak.failed(10 * FORGIVEN_SECONDS) == 2  # nothing was answered
    streak.answered()
    assert streak.failed(10 * FORGIVEN_SECONDS + 1) == 3  # soon after
    streak.answered()
    assert streak.failed(12 * FORGIVEN_SECONDS) == 1


def test_a_lost_peer_ends_the_process() -> None:
    """The error of MLX's ring when the process of another rank was killed."""
    kind = device_error(RuntimeError("[ring] connection to a peer was lost"))
    assert kind == "peer"
    assert kind in ENDS
    assert device_error(RuntimeError("a row said [ring]")) is None
