"""`mlx-server init` writes a models.yaml that is valid, and never over one that is there."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_server.cli import app
from mlx_server.config.models_yaml import check_file, load_settings


@pytest.mark.usefixtures("studio")
def test_a_first_file_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "models.yaml"
    done = CliRunner().invoke(app, ["init"])
    assert done.exit_code == 0, done.output
    assert check_file(file) == []
    assert list(load_settings(file).models) == ["smollm2-135m", "recorded", "org/one", "org/two"]
    file.write_text("models: {}\n", "utf-8")
    again = CliRunner().invoke(app, ["init"])
    assert again.exit_code == 1
    assert "models.yaml is there already" in str(again.exception)
    assert file.read_text("utf-8") == "models: {}\n"
