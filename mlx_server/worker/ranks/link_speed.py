"""One rank of `mlx-server doctor --hostfile`, which measures the link: `python -m` starts it.

Its standard input has its `RankArguments`, and its standard output what it measured, as JSON.
"""

import json
import signal
import sys
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_server.engine.worker_arguments import decode_rank_arguments
from mlx_server.worker.share import connected_group

SECONDS = 40
"""The system ends a rank then, also on a host where the doctor can't."""

SMALL, LARGE = 16 << 10, 16 << 20
"""Bytes: about what a token needs in each half of a layer, and what a piece of a prompt needs."""

SMALL_TIMES, LARGE_TIMES = 50, 4


def main() -> None:
    signal.alarm(SECONDS)
    wanted = decode_rank_arguments(sys.stdin.buffer.read())
    speeds = measured(connected_group(wanted.group, wanted.rank))
    sys.stdout.write(json.dumps(speeds) + "\n")


def measured(group: mx.distributed.Group) -> dict[str, Any]:
    small = _seconds(group, SMALL, SMALL_TIMES)
    large = _seconds(group, LARGE, LARGE_TIMES)
    return {
        "small_bytes": SMALL,
        "small_seconds": small,
        "large_bytes": LARGE,
        "large_seconds": large,
        "right": _is_right(group),
    }


def _seconds(group: mx.distributed.Group, nbytes: int, times: int) -> float:
    """Returns the mean time of an all-reduce; the first one is not counted."""
    values = mx.ones((nbytes // 4,), mx.float32)
    mx.eval(mx.distributed.all_sum(values, group=group, stream=mx.cpu))
    began = perf_counter()
    for _ in range(times):
        mx.eval(mx.distributed.all_sum(values, group=group, stream=mx.cpu))
    return (perf_counter() - began) / times


def _is_right(group: mx.distributed.Group) -> bool:
    own = mx.arange(1000, dtype=mx.float32) + group.rank()
    total = mx.distributed.all_sum(own, group=group, stream=mx.cpu)
    size = group.size()
    expected = mx.arange(1000, dtype=mx.float32) * size + size * (size - 1) / 2
    return bool(mx.array_equal(total, expected))


if __name__ == "__main__":
    main()
