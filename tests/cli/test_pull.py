"""What is larger than the budget is not pulled."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_server.cli import app, machine_checks, pull

pytestmark = pytest.mark.usefixtures("studio")


def test_pull_keeps_to_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger is refused before it is fetched: see tests/sources/test_source.py."""
    file = tmp_path / "small.yaml"
    file.write_text("server: {memory_budget: 10}", "utf-8")
    asked: list[tuple[str, int]] = []

    def resolve(source: str, *_: object, budget: int, **__: object) -> Path:
        asked.append((source, budget))
        return tmp_path

    monkeypatch.setattr(pull, "resolve", resolve)
    result = CliRunner().invoke(app, ["pull", "org/name", "--config", str(file)])
    assert result.exit_code == 0
    assert asked == [("org/name", 10)]
    CliRunner().invoke(app, ["pull", "qwen3.5-9b", "--config", str(file)])
    assert asked[1:] == [("mlx-community/Qwen3.5-9B-4bit", 10)]
    unknown = CliRunner().invoke(app, ["pull", "qwen3", "--config", str(file)])
    assert unknown.exit_code == 1
    assert len(asked) == 2


METAL = """
import json
print(json.dumps({"version": "1", "gpu": True, "name": "M", "working_set": 700_000_000}))
"""


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_on_a_mac_the_budget_is_what_metal_recommends(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(machine_checks, "PROBE", METAL)
    budget = machine_checks.budget_here(None)
    assert budget.gpu is (system == "darwin")
    assert (budget.nbytes < 700_000_000) is budget.gpu
    assert machine_checks.budget_here(10).nbytes == 10
    asked: list[int] = []

    def resolve(source: str, *_: object, budget: int, **__: object) -> Path:
        asked.append(budget)
        return tmp_path

    monkeypatch.setattr(pull, "resolve", resolve)
    CliRunner().invoke(app, ["pull", "org/name"])
    assert asked == [budget.nbytes]
