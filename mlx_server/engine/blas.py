"""Finds a fast BLAS on Linux, where MLX's own wheel brings the slow reference BLAS."""

import subprocess
import sys

LIBRARIES = ("libblis.so.4", "libopenblas.so.0")
"""The libraries to look for, fastest first."""


def fast_blas() -> str | None:
    """Returns the library to put into LD_PRELOAD before MLX is loaded, None if there is none."""
    if sys.platform != "linux":
        return None
    return next(filter(_has_cblas, LIBRARIES), None)


def _has_cblas(library: str) -> bool:
    # This runs in a child, because these libraries start threads when they are loaded.
    trial = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).cblas_sgemm"
    run = subprocess.run([sys.executable, "-ISc", trial, library], capture_output=True)
    return run.returncode == 0
