"""Models that the command line names are looked at before anything is started."""

from pathlib import Path

import pytest

from mlx_server.cli.startup import check_named, checked_settings
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


def test_models_of_the_file_are_not_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("models: {a: {source: /no/such/folder}}")
    settings = checked_settings(file, (), {}, None, discover=False)
    check_named(settings, ())
    assert list(settings.models) == ["a"]
