"""The BLAS that an engine preloads is one that can be loaded, and has the functions."""

import subprocess
import sys

import pytest

from mlx_server.engine import engine_process

WITHOUT_CBLAS = "libm.so.6"


@pytest.mark.parametrize("libraries", [(), ("libnothing.so.9",), (WITHOUT_CBLAS,)])
def test_what_is_no_blas_is_not_taken(
    libraries: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "LIBRARIES", libraries)
    assert engine_process.fast_blas() is None


def test_a_mac_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(engine_process, "_has_cblas", lambda library: True)
    assert engine_process.fast_blas() is None


def test_the_fastest_is_taken_and_is_not_loaded_here() -> None:
    found = engine_process.fast_blas()
    if found is None:
        pytest.skip("no faster BLAS here")
    known = engine_process.LIBRARIES.index(found)
    assert not any(map(engine_process._has_cblas, engine_process.LIBRARIES[:known]))
    maps = "open('/proc/self/maps').read()"
    code = f"from mlx_server.engine.engine_process import fast_blas; fast_blas(); print({maps})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={})
    assert run.returncode == 0
    assert found.partition(".")[0] not in run.stdout
