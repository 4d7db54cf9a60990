"""`serve --discover` and `models --local`, on a home with checkpoints of other programs."""

from pathlib import Path

import pytest

from mlx_server.cli.discovery import with_local_models
from mlx_server.config.settings import ModelSettings, Settings
from tests.live.server import serving


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


@pytest.mark.live
def test_a_server_offers_them_and_answers(studio: Path, tiny_path: Path, tmp_path: Path) -> None:
    config = {"models": {"mine": {"source": str(tiny_path)}}}
    with serving(tmp_path / "run", config, "--discover") as server, server.http() as http:
        listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert listed[-2:] == ["org/one", "org/two"]
        asked = {"model": "org/two", "prompt": "a", "max_tokens": 2}
        answer = http.post("/v1/completions", json=asked)
    assert answer.json()["usage"]["completion_tokens"] == 2
