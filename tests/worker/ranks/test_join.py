"""A rank that can't join its group says so at once; `test_share` has ranks that join."""

import subprocess
import sys

import msgspec
import pytest

from tests.engine.clients import HANG
from tests.live.ranks import loopback_group

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
from pathlib import Path
import msgspec
from mlx_server.engine.worker_arguments import RankGroup
from mlx_server.worker.share import joined_share

try:
    joined_share(msgspec.json.decode(sys.argv[2], type=RankGroup), int(sys.argv[1]))
except RuntimeError:
    assert not Path(os.environ["MLX_HOSTFILE"]).exists()
    print("refused")
"""


def test_a_rank_that_is_no_part_of_the_group_is_an_error_and_leaves_no_file() -> None:
    group = msgspec.json.encode(loopback_group(2)).decode()
    command = [sys.executable, "-c", PROGRAM, "2", group]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert run.stdout == "refused\n", run.stderr
