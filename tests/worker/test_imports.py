"""What the engine imports of mlx-lm, and what it leaves out."""

import subprocess
import sys

import pytest

from mlx_server.worker.mlx_lm_internals import check_mlx_lm


def test_this_version_has_all_of_it() -> None:
    check_mlx_lm()


IN_A_NEW_PROCESS = """
import sys
from importlib.util import find_spec
from mlx_server.worker.unused_imports import UNUSED, left_out

with left_out():
    from mlx_server.worker.engine import Engine
    from mlx_lm.tokenizer_utils import NewlineTokenizer
assert NewlineTokenizer.__name__ == "NewlineTokenizer"
assert sys.modules.keys().isdisjoint(UNUSED), "a placeholder stays"
assert not any(name.startswith("torch") for name in sys.modules)
assert all(find_spec(name).origin for name in UNUSED), "the real one can be imported later"
"""


def test_the_engine_starts_without_what_it_never_calls() -> None:
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], check=True)


@pytest.mark.slow
def test_a_process_that_has_the_real_package_keeps_it() -> None:
    code = """
import huggingface_hub
from mlx_server.worker.unused_imports import left_out

with left_out():
    from huggingface_hub import snapshot_download
assert snapshot_download.__module__.startswith("huggingface_hub.")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
