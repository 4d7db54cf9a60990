"""`serve --discover` and `models --local`, on a home with checkpoints of other programs."""

import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_server.cli import app, machine_checks
from mlx_server.cli.discovery import with_local_models
from mlx_server.config.settings import ModelSettings, Settings
from mlx_server.sources import source as sources
from tests.live.server import serving


@pytest.fixture(autouse=True)
def studio(tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """LM Studio's folder, with two models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    folder = tmp_path / ".lmstudio/models/org"
    for name in ("one", "two"):
        shutil.copytree(tiny_path, folder / name)
    return folder


def test_what_is_listed_keeps_its_name_and_settings(studio: Path) -> None:
    mine = ModelSettings(source=str(studio / "one"), context_length=99)
    found = with_local_models(Settings(models={"mine": mine})).models
    assert {id: model.source for id, model in found.items()} == {
        "mine": str(studio / "one"),
        "org/two": str(studio / "two"),
    }
    assert found["mine"].context_length == 99


def test_names_that_are_taken_are_not_taken_again(studio: Path) -> None:
    mine = ModelSettings(source="org/other", aliases=("org/two",))
    assert list(with_local_models(Settings(models={"mine": mine})).models) == ["mine", "org/one"]


def test_what_is_damaged_or_too_large_is_not_offered(studio: Path) -> None:
    (studio / "one/tokenizer.json").unlink()
    assert list(with_local_models(Settings()).models) == ["org/two"]
    small = Settings.model_validate({"server": {"memory_budget": 10}})
    assert with_local_models(small).models == {}


def test_models_local_shows_them(studio: Path) -> None:
    result = CliRunner().invoke(app, ["models", "--local"])
    assert result.exit_code == 0
    assert "org/one" in result.output
    assert f"source: {studio / 'two'}" in result.output


def test_models_local_keeps_to_the_budget_of_models_yaml(studio: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("server: {memory_budget: 10}", "utf-8")
    result = CliRunner().invoke(app, ["models", "--local", "--config", str(file)])
    assert result.exit_code == 0
    assert result.output.count("no: too large") == 2
    assert "models.yaml" not in result.output, "none of them can be served"


def test_pull_keeps_to_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger is refused before it is fetched: see tests/sources/test_source.py."""
    file = tmp_path / "small.yaml"
    file.write_text("server: {memory_budget: 10}", "utf-8")
    asked: list[tuple[str, int]] = []

    def resolve(source: str, *_: object, budget: int, **__: object) -> Path:
        asked.append((source, budget))
        return tmp_path

    monkeypatch.setattr(sources, "resolve", resolve)
    result = CliRunner().invoke(app, ["pull", "org/name", "--config", str(file)])
    assert result.exit_code == 0
    assert asked == [("org/name", 10)]


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
    assert budget.metal is (system == "darwin")
    assert (budget.nbytes < 700_000_000) is budget.metal
    assert machine_checks.budget_here(10).nbytes == 10
    asked: list[int] = []

    def resolve(source: str, *_: object, budget: int, **__: object) -> Path:
        asked.append(budget)
        return tmp_path

    monkeypatch.setattr(sources, "resolve", resolve)
    CliRunner().invoke(app, ["pull", "org/name"])
    assert asked == [budget.nbytes]


@pytest.mark.live
def test_a_server_offers_them_and_answers(studio: Path, tiny_path: Path, tmp_path: Path) -> None:
    config = {"models": {"mine": {"source": str(tiny_path)}}}
    with serving(tmp_path / "run", config, "--discover") as server, server.http() as http:
        listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert listed[-2:] == ["org/one", "org/two"]
        asked = {"model": "org/two", "prompt": "a", "max_tokens": 2}
        answer = http.post("/v1/completions", json=asked)
    assert answer.json()["usage"]["completion_tokens"] == 2
