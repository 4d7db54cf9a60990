"""Who gets a place, and who gives his."""

import pytest

from mlx_server.http.admission import Admission


class Line:
    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.closed = False

    def close_for_another(self) -> None:
        assert not self.closed, "once"
        self.closed = True

    def leave(self) -> None:
        self._admission.is_busy(self)
        self._admission.leave(self)


@pytest.fixture
def admission() -> Admission:
    return Admission(4, 3)


def entered(admission: Admission, source: str) -> Line | None:
    line = Line(admission)
    return line if admission.enter(line, source) else None


def busy(admission: Admission, source: str) -> Line:
    line = entered(admission, source)
    assert line
    return line


def idle(admission: Admission, source: str) -> Line:
    line = busy(admission, source)
    admission.is_idle(line, source)
    return line


def test_idle_ones_go_before_those_with_half_of_a_head(admission: Admission) -> None:
    arriving, *others = [idle(admission, source) for source in "abc"]
    admission.is_arriving(arriving, "a")
    silent = [idle(admission, source) for source in "d"] + others
    for source in "efg":
        assert busy(admission, source)
    assert all(line.closed for line in silent)
    assert not arriving.closed
    assert busy(admission, "h")
    assert arriving.closed


def test_requests_are_never_cut(admission: Admission) -> None:
    lines = [busy(admission, source) for source in "abcd"]
    assert entered(admission, "e") is None
    assert not any(line.closed for line in lines)
    lines[0].leave()
    assert entered(admission, "e")


def test_one_address_leaves_places_for_others(admission: Admission) -> None:
    lines = [busy(admission, "a") for _ in range(3)]
    other = idle(admission, "b")
    assert entered(admission, "a") is None
    assert not other.closed, "an address that has too many closes its own"
    lines[0].leave()
    assert entered(admission, "a")
