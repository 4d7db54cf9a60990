"""Models that the command line names are looked at before anything is started."""

import json
import shutil
from pathlib import Path

import pytest

from mlx_server.cli.startup import checked_settings
from mlx_server.errors import SettingsError

pytestmark = pytest.mark.usefixtures("folder")


def named(*models: Path) -> list[str]:
    return [str(each) for each in models]


def test_one_that_can_be_served_is_enough(
    tiny_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = named(tiny_path, tmp_path / "missing")
    settings = checked_settings(None, models, {}, None, discover=False)
    assert list(settings.models) == [tiny_path.name, "missing"]
    (warning,) = caplog.messages
    assert warning.startswith("missing can't be served: ")


def test_where_none_can_be_served_each_is_named(tmp_path: Path) -> None:
    models = named(tmp_path / "one", tmp_path / "two")
    with pytest.raises(SettingsError) as caught:
        checked_settings(None, models, {}, None, discover=False)
    lines = caught.value.message.splitlines()
    assert [line.split(":")[0] for line in lines] == ["one", "two"]


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
