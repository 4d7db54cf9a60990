"""What is checked before a server starts: settings, transcripts and models on this machine."""

import json
import shutil
from pathlib import Path

import pytest

from mlx_server.cli.machine_checks import check_transcripts
from mlx_server.cli.startup import checked_settings, with_local_models
from mlx_server.config.settings import ModelSettings, Settings, validated
from mlx_server.errors import SettingsError

pytestmark = pytest.mark.usefixtures("folder")


def named(*models: Path) -> list[str]:
    return [str(each) for each in models]


def test_the_demo_is_served_without_a_models_yaml_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("MLX_SERVER_API_KEY", "k")
    monkeypatch.setenv("MLX_SERVER_CACHE", "/cache")
    assert list(checked_settings(None, (), {}, None, discover=False).models) == ["smollm2-135m"]
    misspelt, demo = caplog.messages
    assert misspelt.endswith("a server does not read it: did you mean MLX_SERVER_API_KEYS?")
    assert demo.startswith("no models.yaml is here: the demo model is served")
    Path("models.yml").write_text("models: {a: {source: org/a}}")
    with pytest.raises(SettingsError, match=r"models\.yml is not read: rename it to models\.yaml"):
        checked_settings(None, (), {}, None, discover=False)


def test_models_of_the_file_are_looked_at_without_a_network(
    tiny_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_path, tmp_path / "other")
    (tmp_path / "other/config.json").write_text('{"model_type": "nothing"}')
    shutil.copytree(tiny_path, tmp_path / "half")
    (tmp_path / "half/model.safetensors").unlink()
    models = {
        "absent": {"source": "./nothere"},
        "other": {"source": "./other"},
        "half": {"source": "./half"},
        "hub": {"source": "org/name"},
        "adapted": {"source": str(tiny_path), "adapters": {"mine": "./gone"}},
        "whole": {"source": str(tiny_path)},
    }
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({"models": models}))
    settings = checked_settings(file, (), {}, None, discover=False)
    assert list(settings.models) == [*models]
    said = {message.split(" ")[0]: message for message in caplog.messages}
    assert said.keys() == {"absent", "other", "half", "adapted"}
    assert "The folder 'nothere' does not exist" in said["absent"]
    assert "model type 'nothing'" in said["other"]
    assert "lacks model*.safetensors" in said["half"]
    assert "its adapter 'mine' is not there: the folder 'gone' does not exist" in said["adapted"]


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
    small = validated(Settings, {"server": {"memory_budget": 10}})
    assert with_local_models(small).models == {}


SAID = "- answer: {text: Yes.}\n- answer: {calls: [{name: f}]}\n"


def settings(folder: Path, family: str) -> Settings:
    (folder / "said.yaml").write_text(SAID)
    source = f"replay:{folder / 'said.yaml'}"
    return Settings(models={"fake": ModelSettings(source=source, family=family)})


def test_an_answer_that_the_family_can_not_write_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"fake: said\.yaml:2: entry 2: The family gemma3"):
        check_transcripts(settings(tmp_path, "gemma3"))


def test_answers_in_words_are_for_any_family(tmp_path: Path) -> None:
    check_transcripts(settings(tmp_path, "mistral"))
