"""The simulated machines: what users add, and what becomes of a server's model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_parts.__main__ import app
from bench_parts.simulated import servers, short_prompts
from bench_parts.simulated.roofline import MACHINES, pair, seconds
from typer.testing import CliRunner

SITE = Path(__file__).parents[2] / "scripts" / "bench_parts" / "simulated" / "site"

OWN = """
[machines.mine]
bandwidth = 1e9
operations = 1e12
launch = 0.5

[models.mine]
dense_bytes = 2e9
active = 1e9
layers = 1
heads = 1
kv_heads = 1
head_dim = 1
"""

ASKS = """
import time
import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
args = llama.ModelArgs("llama", 8, 1, 8, 1, 1e-5, 320)
model, cache, began = llama.Model(args), [KVCache()], time.perf_counter()
token = mx.argmax(model(mx.array([[1, 2, 3]]), cache=cache)[0, -1]).item()
print(token, cache[0].offset, time.perf_counter() - began)
"""


def test_users_add_machines_and_models(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(OWN)
    machine, model = pair("mine:mine", own)
    assert seconds(machine, model, 1, [1]) == pytest.approx(2.5, abs=0.01)  # read
    assert seconds(machine, model, 5000, [5000]) == pytest.approx(10.6, abs=0.2)  # computed
    assert pair("m4-max:mine", own) == (MACHINES["m4-max"], model)


def measured(pair: str, server: str, own: Path | None) -> servers.Measured:
    return servers.Measured(pair, server, 29.0, 37.0, 0.3, 0.22, (5.4, 5.8), (10.2, 15.3))


def measured_short(pair: str, server: str, own: Path | None) -> short_prompts.ShortPrompts:
    crowd = servers.Crowd(0.0, 37.0, 29.0)
    return short_prompts.ShortPrompts(pair, server, crowd, crowd, 0.3)


@pytest.mark.parametrize("short", [[], ["--short"]])
def test_the_output_has_both_servers_and_says_that_it_is_a_model_of_a_machine(
    short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "measured", measured)
    monkeypatch.setattr(short_prompts, "measured", measured_short)
    command = ["--simulate", "m4-max:gpt-oss-120b", "--markdown", *short]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert "No Mac was measured" in done.output
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| m4")]
    assert [row[1] for row in rows] == ["mlx-server", "mlx_lm.server"]
    assert all(row[0] == "| m4-max, gpt-oss-120b" for row in rows)
    assert all("29.0" in row[2] and "37.0" in row[3] for row in rows)


@pytest.mark.slow
def test_any_server_on_mlx_lm_takes_the_time_of_the_named_model(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(OWN)
    places = [str(SITE), str(SITE.parents[2]), os.environ.get("PYTHONPATH", "")]
    simulated = {"MLX_SIMULATED": "mine:mine", "MLX_SIMULATED_FILE": str(own)}
    environment = {**os.environ, **simulated, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-c", ASKS]
    reported = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    token, offset, took = reported.stdout.split()
    assert (token, offset) == ("100", "3")
    assert float(took) >= 2.5
