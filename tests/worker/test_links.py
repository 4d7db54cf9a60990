"""The formula by which `scripts/bench --simulate links` compares one Mac with several."""

from dataclasses import replace

import pytest
from bench_parts.__main__ import app
from bench_parts.simulated import links
from bench_parts.simulated.links import CONTEXT, LINKS, Link, gain, least_bytes
from bench_parts.simulated.roofline import MACHINES, MODELS
from typer.testing import CliRunner

FREE = Link(latency=0.0, bandwidth=1e30)
PRO, DENSE = MACHINES["m4-pro"], MODELS["8b"]


def test_without_a_links_time_two_macs_save_half_of_all_but_the_head_and_the_launch() -> None:
    machine = replace(PRO, launch=0.0)
    headless = replace(DENSE, head_bytes=0.0)
    assert gain(machine, headless, FREE, 2, "tensor", 1) == pytest.approx(2.0)
    assert gain(machine, headless, FREE, 4, "tensor", 1) == pytest.approx(4.0)
    assert 1.7 < gain(PRO, DENSE, FREE, 2, "tensor", 1) < 2.0


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("machine", MACHINES)
def test_two_macs_are_quicker_from_the_bytes_that_the_table_says(link: str, machine: str) -> None:
    least = least_bytes(MACHINES[machine], LINKS[link], DENSE.layers, DENSE.width)
    context = DENSE.kv_bytes * CONTEXT

    def times_as_quick(read: float) -> float:
        model = replace(DENSE, dense_bytes=read - context, head_bytes=0.0, active=0.0)
        return gain(MACHINES[machine], model, LINKS[link], 2, "tensor", 1)

    assert times_as_quick(0.98 * least) < 1 < times_as_quick(1.02 * least)


def test_the_command_prints_a_row_for_each_pair_and_for_each_link() -> None:
    printed = CliRunner().invoke(app, ["--simulate", "links", "--markdown"]).stdout
    rows = [line for line in printed.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == 2 + len(links.PAIRS) + 2 * len(LINKS)
