"""A faster BLAS for Linux: the one in MLX's own wheel there is the slow reference BLAS."""

import subprocess
import sys

LIBRARIES = ("libblis.so.4", "libopenblas.so.0")
"""The fastest first."""


def fast_blas() -> str | None:
    """What to put into LD_PRELOAD before MLX is loaded; None: nothing of use is here."""
    if sys.platform != "linux":
        return None
    return next(filter(_has_cblas, LIBRARIES), None)


def _has_cblas(library: str) -> bool:
    # In a child: these libraries start threads of their own when they are loaded.
    trial = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).cblas_sgemm"
    run = subprocess.run([sys.executable, "-ISc", trial, library], capture_output=True)
    return run.returncode == 0
