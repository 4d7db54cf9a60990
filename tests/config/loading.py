"""Settings from files in the present folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent

from mlx_server.config.models_yaml import check_file, load_settings
from mlx_server.config.settings import Settings
from mlx_server.config.yaml_lines import YamlProblem

MINIMAL = "models:\n  a: {source: demo:smollm2}\n"


def written(text: str | bytes, name: str = "models.yaml") -> Path:
    path = Path(name)
    path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
    return path


def load(
    path: Path | None = None,
    models: Sequence[str] = (),
    overrides: Mapping[str, object] | None = None,
    **environ: str,
) -> Settings:
    return load_settings(path, models=models, overrides=overrides or {}, environ=environ)


def problems_of(text: str | bytes) -> list[tuple[int, str]]:
    return [(problem.line, str(problem)) for problem in check_file(written(text))]


def problem(text: str | bytes) -> YamlProblem:
    (only,) = check_file(written(text))
    return only
