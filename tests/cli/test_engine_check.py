"""An engine that is started to see whether it can be."""

import sys

import pytest

from mlx_server.cli.engine_check import run_engine_check

pytestmark = [pytest.mark.tables, pytest.mark.usefixtures("folder")]


def test_doctor_tells_of_an_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (check,) = run_engine_check()
    assert (check.status, check.name) == ("fail", "engine")
    assert check.found == "FileNotFoundError: No such file or directory: 'python'"
