"""What `mlx-server doctor --hostfile` measures, by two real ranks on loopback."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_server.engine.worker_arguments import RankArguments, WorkerArguments, encode_arguments
from mlx_server.worker.ranks import link_speed
from mlx_server.worker.ranks.link_speed import LARGE, SMALL, measured
from tests.live.ranks import loopback_group


@pytest.mark.slow
def test_each_rank_prints_what_it_measured_as_one_line_of_json() -> None:
    group = loopback_group(2)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", link_speed.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in group.hosts
    ]
    for rank, process in enumerate(running):
        assert process.stdin
        process.stdin.write(encode_arguments(RankArguments(rank, group, WorkerArguments())))
        process.stdin.close()
        process.stdin = None
    for process in running:
        out, _ = process.communicate(timeout=60)
        (line,) = out.splitlines()
        found = json.loads(line)
        assert process.returncode == 0
        assert found["right"] is True
        assert (found["small_bytes"], found["large_bytes"]) == (SMALL, LARGE)
        assert 0 < found["small_seconds"] < found["large_seconds"] < 40


@pytest.mark.parametrize("wrong", ["doubled", "first value", "none added"])
def test_sums_that_are_wrong_are_told_of(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_sum(values: mx.array, **options: object) -> mx.array:
        if wrong == "doubled":
            return 2 * values
        if wrong == "first value":
            return mx.concatenate([values[:1] + 1, values[1:]])
        return mx.zeros_like(values)

    monkeypatch.setattr(link_speed, "LARGE", SMALL)
    assert measured(mx.distributed.init())["right"] is True
    monkeypatch.setattr(mx.distributed, "all_sum", all_sum)
    assert measured(mx.distributed.init())["right"] is False
