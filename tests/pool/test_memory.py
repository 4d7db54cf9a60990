"""The memory budget of machines, and the memory that a process takes."""

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from mlx_server.engine.messages import KvCost
from mlx_server.pool.memory import MemoryParts, footprint, memory_budget
from mlx_server.worker.kv_caches import cache_cost
from tests.worker.kinds import CONFIGS, SIZES

GB, MIB = 10**9, 1 << 20

WORKING_SETS = {
    8: 5_461 * MIB,
    16: 10_922 * MIB,
    18: 12_288 * MIB,
    24: 16_384 * MIB,
    32: 21_845 * MIB,
    36: 27_648 * MIB,
    48: 36_864 * MIB,
    64: 49_152 * MIB,
    96: 73_728 * MIB,
    128: 98_304 * MIB,
    192: 147_456 * MIB,
    256: 196_608 * MIB,
    512: 393_216 * MIB,
}
"""RAM in GiB, and the smallest `recommendedMaxWorkingSetSize` that is reported of such machines in
public logs of llama.cpp and MLX; newer versions of macOS recommend more (26,801 MB of 32 GiB,
30,151 MB of 36, 107.5 GiB of 128). 24, 48, 256 and 512 follow from the others: two thirds of the
RAM below 36, three quarters from there."""


@dataclass(frozen=True)
class Checkpoint:
    nbytes: float
    """Of its weights' files, in GB."""
    config: dict[str, Any]
    """What its config.json says of its layers."""
    least: int
    """RAM in GiB of the smallest machine that serves it with its default budget."""

    @property
    def weights(self) -> int:
        return int(self.nbytes * GB)

    @cached_property
    def kv(self) -> KvCost:
        with mock.patch("mlx.core.metal.is_available", return_value=True):
            return cache_cost(self.config)


def layers(model_type: str, count: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        **SIZES,
        **CONFIGS[model_type],
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        **more,
    }


PUBLISHED = Path(__file__).with_name("checkpoints.jsonl")
CHECKPOINTS = {
    row["name"]: Checkpoint(row["gigabytes"], layers(**row["layers"]), row["least"])
    for row in map(json.loads, PUBLISHED.read_text("utf-8").splitlines())
}

USEFUL = 2048
"""Tokens; a model that leaves room for less is not served with any use."""


ROWS, LONG = 16, 8_192
"""A batch that is large for each of these models."""

PAIRS = [(ram, name) for ram in WORKING_SETS for name in CHECKPOINTS]


def room(ram: int, name: str) -> int:
    """Bytes that the model leaves for caches."""
    return memory_budget(None, WORKING_SETS[ram]).nbytes - CHECKPOINTS[name].weights


@pytest.mark.slow
@pytest.mark.parametrize(("ram", "name"), PAIRS)
def test_a_machine_serves_what_people_run_on_it(ram: int, name: str) -> None:
    model = CHECKPOINTS[name]
    assert (room(ram, name) >= model.kv.for_tokens(USEFUL)) == (ram >= model.least)


@pytest.mark.parametrize("ram", WORKING_SETS)
def test_no_more_is_left_out_than_a_tenth(ram: int) -> None:
    budget = memory_budget(None, WORKING_SETS[ram])
    assert 0.9 * WORKING_SETS[ram] < budget.nbytes < WORKING_SETS[ram]
    assert (budget.warning, budget.mlx_limit) == (None, WORKING_SETS[ram])
    assert "the GPU's recommended working set" in budget.source
    assert "`memory_budget`" in budget.source


def test_without_metal_it_is_a_share_of_the_ram() -> None:
    budget = memory_budget(None, None)
    assert budget.recommended == int(0.75 * psutil.virtual_memory().total)
    assert 0.5 * budget.recommended <= budget.nbytes < budget.recommended
    assert "three quarters of RAM" in budget.source


def test_the_owner_decides_and_is_warned() -> None:
    small, large = memory_budget(10 * GB, 20 * GB), memory_budget(21 * GB, 20 * GB)
    assert (small.nbytes, small.mlx_limit, small.warning) == (10 * GB, 10 * GB, None)
    assert (large.nbytes, large.mlx_limit) == (21 * GB, 21 * GB)
    assert large.warning
    assert "21.0 GB is more than the 20.0 GB that are recommended for this GPU" in large.warning
    assert "set by `memory_budget`" in large.source


PROMPT, ANSWER = 2048, 16_384


def test_models_over_several_machines_and_those_of_this_one_share_its_budget() -> None:
    alone, with_others = MemoryParts(1, has_own=False), MemoryParts(2, has_own=True)
    assert (alone.of_group(90), alone.own(90)) == (90, 0)
    assert (with_others.of_group(90), with_others.own(90)) == (30, 30)
    assert with_others.of_group(12) == 4, "a smaller machine decides"


HOLDER = """
import os, sys
print("started", flush=True)
sys.stdin.readline()
held = os.urandom(32_000_000)
print(len(held), flush=True)
sys.stdin.read()
"""


def test_it_grows_with_what_a_process_holds() -> None:
    """In a process of its own: one that has freed memory before allocates that first."""
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == "started\n"
        before = footprint(holder.pid)
        assert before > 1_000_000
        holder.stdin.write("\n")
        held = int(holder.stdout.readline())
        assert footprint(holder.pid) - before > held / 2


def test_a_process_that_has_ended_takes_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not psutil.pid_exists(ended.pid)
    assert footprint(ended.pid) == 0
