"""The class of scheduling in which MLX's threads take half the time."""

import os
import sys
from collections.abc import Iterator

import pytest

from mlx_server.system.process import keep_time_slices

if sys.platform == "linux":

    @pytest.fixture
    def _as_by_default() -> Iterator[None]:
        policy = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        yield
        os.sched_setscheduler(0, policy, os.sched_param(0))

    @pytest.mark.usefixtures("_as_by_default")
    def test_a_thread_keeps_its_time_slice() -> None:
        keep_time_slices()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    @pytest.mark.usefixtures("_as_by_default")
    def test_a_sandbox_may_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(*_: object) -> None:
            raise PermissionError

        with monkeypatch.context() as patches:
            patches.setattr(os, "sched_setscheduler", forbidden)
            keep_time_slices()
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
