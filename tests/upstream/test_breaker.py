from mlx_server.upstream.connection import (
    FAILURES,
    FIRST_PAUSE,
    MOST_CLIENTS,
    CircuitBreaker,
    UpstreamBreaker,
)
from tests.clocks import Clock


def failing(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.begin()
        breaker.failed()


def test_one_probe_at_a_time_decides() -> None:
    breaker = CircuitBreaker(clock := Clock())
    failing(breaker, FAILURES)
    clock.now += FIRST_PAUSE
    assert breaker.seconds_left() == 0
    breaker.begin()
    assert breaker.seconds_left() > 0
    breaker.failed()
    assert breaker.seconds_left() == 2 * FIRST_PAUSE
    clock.now += 2 * FIRST_PAUSE
    breaker.begin()
    breaker.abandoned()
    assert breaker.seconds_left() == 0
    breaker.begin()
    breaker.succeeded()
    assert not breaker.is_open
    failing(breaker, FAILURES)
    assert breaker.seconds_left() == FIRST_PAUSE


def test_a_failure_that_began_before_does_not_lengthen_the_pause() -> None:
    breaker = CircuitBreaker(Clock())
    for each in (breaker.begin, breaker.failed):
        for _ in range(FAILURES + 3):
            each()
    assert breaker.seconds_left() == FIRST_PAUSE


def test_few_clients_are_remembered() -> None:
    breaker = UpstreamBreaker(Clock())
    for _ in range(FAILURES):
        breaker.failed("first")
    for number in range(MOST_CLIENTS):
        breaker.failed(f"{number}")
    assert breaker.seconds_left("first") == 0
