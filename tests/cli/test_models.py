"""Models in the folders of other programs, as the commands show them."""

from pathlib import Path

from typer.testing import CliRunner

from mlx_server.cli import app


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
