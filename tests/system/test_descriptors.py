"""The limit on open files is raised as far as it goes, and reported when it is too low."""

import resource
from collections.abc import Callable

import pytest

from mlx_server import limits
from mlx_server.cli.machine_checks import _descriptors
from mlx_server.system import descriptors

INFINITY = resource.RLIM_INFINITY


class System:
    """A kernel that takes no more than `takes`, whatever the hard limit says."""

    def __init__(self, soft: int, hard: int, takes: int) -> None:
        self.limits = soft, hard
        self._takes = takes

    def get(self, kind: int) -> tuple[int, int]:
        assert kind == resource.RLIMIT_NOFILE
        return self.limits

    def set(self, kind: int, wanted: tuple[int, int]) -> None:
        soft, hard = wanted
        assert hard == self.limits[1], "the hard limit could not be raised again"
        if not 0 <= soft <= self._takes:
            raise ValueError("current limit exceeds maximum limit")
        self.limits = wanted


Install = Callable[[int, int, int], System]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def with_limits(soft: int, hard: int, takes: int) -> System:
        system = System(soft, hard, takes)
        monkeypatch.setattr(resource, "getrlimit", system.get)
        monkeypatch.setattr(resource, "setrlimit", system.set)
        return system

    return with_limits


@pytest.mark.parametrize(
    ("soft", "hard", "takes", "raised"),
    [
        (1024, 1 << 20, 1 << 20, limits.DESCRIPTORS),
        (256, INFINITY, 10_240, limits.DESCRIPTORS),
        (256, INFINITY, 5000, 4096),
        (256, INFINITY, 300, 256),
        (256, 2000, 2000, 2000),
        (256, 256, 256, 256),
        (65_536, 1 << 20, 1 << 20, 65_536),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_goes(
    install: Install, soft: int, hard: int, takes: int, raised: int
) -> None:
    system = install(soft, hard, takes)
    assert descriptors.raise_soft_limit() == raised
    assert system.limits == (raised, hard)


@pytest.mark.parametrize("there_are", [16, 64, 256, 1024, 4096, 8192, 1 << 20])
def test_some_are_left_for_all_else(there_are: int) -> None:
    most = descriptors.connections(there_are)
    assert 0 < most <= there_are // 2
    assert 0 < descriptors.connections_per_address(most) < max(2, most)


@pytest.mark.parametrize(("there_are", "enough"), [(256, False), (4095, False), (4096, True)])
def test_too_few_are_told_of(there_are: int, enough: bool) -> None:
    assert (descriptors.warning(there_are) is None) == enough


@pytest.mark.parametrize(("hard", "status"), [(256, "warn"), (4095, "warn"), (INFINITY, "ok")])
def test_doctor_tells_of_them_before_a_server_starts(
    install: Install, hard: int, status: str
) -> None:
    install(256, hard, 10_240)
    check = _descriptors(descriptors.within_reach())
    assert (check.name, check.status) == ("files", status)
    assert ("ulimit -Hn 4096" in check.fix) == (status == "warn")
