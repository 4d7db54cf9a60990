"""Entries of models.yaml for a model on another server."""

from pathlib import Path

from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import model_spec
from mlx_server.upstream.spec import UpstreamSpec


def written(folder: Path, entry: str) -> Path:
    file = folder / "models.yaml"
    lines = "".join(f"    {line}\n" for line in entry.splitlines())
    file.write_text(f"models:\n  up:\n{lines}", "utf-8")
    return file


def spec(folder: Path, entry: str) -> UpstreamSpec:
    settings = load_settings(written(folder, entry), environ={})
    found = model_spec("up", settings.models["up"]).upstream
    assert found
    return found
