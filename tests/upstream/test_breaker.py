from mlx_server.upstream.connection import (
    FAILURES,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_CLIENTS,
    CircuitBreaker,
    UpstreamBreaker,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


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


def test_the_pause_has_an_end() -> None:
    breaker = CircuitBreaker(clock := Clock())
    failing(breaker, FAILURES)
    for _ in range(20):
        clock.now += breaker.seconds_left()
        failing(breaker)
    assert breaker.seconds_left() == LONGEST_PAUSE


def test_a_failure_that_began_before_does_not_lengthen_the_pause() -> None:
    breaker = CircuitBreaker(Clock())
    for each in (breaker.begin, breaker.failed):
        for _ in range(FAILURES + 3):
            each()
    assert breaker.seconds_left() == FIRST_PAUSE


def test_clients_are_told_apart() -> None:
    breaker = UpstreamBreaker(Clock())
    for _ in range(FAILURES):
        breaker.begin("one")
        breaker.failed("one")
    assert (breaker.seconds_left("one"), breaker.seconds_left("two")) == (FIRST_PAUSE, 0)
    assert breaker.is_open
    breaker.begin("two")
    breaker.succeeded("two")
    assert breaker.seconds_left("one") == FIRST_PAUSE
    assert not breaker.is_open


def test_what_concerns_all_counts_for_all() -> None:
    breaker = UpstreamBreaker(clock := Clock())
    for _ in range(FAILURES):
        breaker.begin("one")
        breaker.unreachable("one")
    assert breaker.is_open
    assert breaker.seconds_left("two") == FIRST_PAUSE
    clock.now += FIRST_PAUSE
    breaker.begin("two")
    assert breaker.seconds_left("one") > 0
    breaker.failed("two")  # it is reached again
    assert breaker.seconds_left("one") == 0


def test_few_clients_are_remembered() -> None:
    breaker = UpstreamBreaker(Clock())
    for _ in range(FAILURES):
        breaker.failed("first")
    for number in range(MOST_CLIENTS):
        breaker.failed(f"{number}")
    assert breaker.seconds_left("first") == 0
