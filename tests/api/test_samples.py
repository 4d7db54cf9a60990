"""The samples that the page draws: speed and memory, bounded in number and in time."""

import pytest

from mlx_server import limits
from mlx_server.engine.messages import StepOutput, Token
from mlx_server.http.metrics import SAMPLE_SECONDS, Samples


def step(tokens: int) -> StepOutput:
    return StepOutput("m", [Token(0, 5)] * tokens, 0, 0, 0)


class Clock:
    now = 1_000_000.0 * SAMPLE_SECONDS

    def __call__(self) -> float:
        return self.now


def test_speed_counts_the_time_in_which_tokens_came() -> None:
    clock = Clock()
    samples = Samples(clock)
    for _ in range(11):
        samples.stepped(step(4))
        clock.now += 0.1
    clock.now += 3  # nothing to do
    samples.stepped(step(4))
    samples.first_token(1.0)
    samples.first_token(3.0)
    found = samples.columns()
    assert found["at"] == [1_000_000 * SAMPLE_SECONDS]
    assert found["tokens_per_second"] == [pytest.approx(40, rel=0.01)]
    assert found["first_token_seconds"] == [2.0]


def test_memory_is_the_most_of_its_time_and_nothing_is_sampled_while_nothing_happens() -> None:
    clock = Clock()
    samples = Samples(clock)
    samples.memory(100)
    samples.memory(900)
    samples.memory(500)
    clock.now += 40 * SAMPLE_SECONDS
    samples.memory(500)
    samples.memory(200)
    found = samples.columns()
    assert found["memory"] == [900, 500]
    assert found["memory_now"] == 200
    assert [at - found["at"][0] for at in found["at"]] == [0, 40 * SAMPLE_SECONDS]


def test_samples_are_bounded_in_number_and_in_time() -> None:
    clock, most = Clock(), limits.SAMPLES
    samples = Samples(clock)
    for number in range(most + 50):
        samples.memory(number + 1)
        clock.now += SAMPLE_SECONDS
    assert len(samples.columns()["at"]) == most
    clock.now += SAMPLE_SECONDS * (most - 10)
    assert len(samples.columns()["at"]) == 10
