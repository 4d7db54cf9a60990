"""Work that takes long is reported once, and its end."""

from mlx_server.engine.liveness import LONG_SECONDS, EngineActivity


def test_what_takes_long_is_told_once_and_when_it_is_over() -> None:
    doing = EngineActivity()
    what = "reading the vocabulary of gpt-oss"
    assert doing.report(what, 10.0) is None
    assert doing.report(what, 10.0 + LONG_SECONDS - 0.1) is None
    reported = doing.report(what, 10.0 + LONG_SECONDS)
    assert reported
    assert what in reported
    assert doing.report(what, 20.0) is None
    assert doing.seconds(20.0) == 10.0
    assert doing.report("compiling a grammar", 21.0) == f"{what} took 11.0 s"
    assert doing.report("generating", 21.5) is None


def test_answers_and_rest_are_nothing_to_tell_of() -> None:
    doing = EngineActivity()
    for what in ("generating", "idle"):
        assert [doing.report(what, at) for at in (0.0, 100.0, 1000.0)] == [None] * 3
