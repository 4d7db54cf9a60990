"""`mlx-server replay record` without requests: a server that records what an app is answered."""

import os
from pathlib import Path

from mlx_server.api.transcript_recorder import TranscriptRecorder
from mlx_server.app import create_app, run_app
from mlx_server.config.models_yaml import load_settings, upstream_model
from mlx_server.config.settings import Settings
from mlx_server.pool.progress import progress_display


def serve_recorded(
    model: str,
    output: Path,
    config: Path | None,
    upstream: str | None,
    api_key_env: str | None,
    port: int | None,
) -> None:
    """Serves until Ctrl-C. upstream: the base URL of a server that is not in models.yaml."""
    settings = recorded_settings(model, config, upstream, api_key_env, port)
    recorder = TranscriptRecorder(output, secrets_of(settings))
    run_app(settings, lambda: create_app(settings, progress_display(), recorder=recorder))


def recorded_settings(
    model: str, config: Path | None, upstream: str | None, api_key_env: str | None, port: int | None
) -> Settings:
    """Those of models.yaml, with this model alone."""
    settings = load_settings(config, overrides={"port": port})
    named = {id: m for id, m in settings.models.items() if model in (id, *m.aliases)}
    if upstream is not None:
        named = {model: upstream_model(model, upstream, api_key_env)}
    elif not named:
        named = dict(load_settings(None, models=[model], environ={}).models)
    return settings.model_copy(update={"models": named})


def secrets_of(settings: Settings) -> list[str]:
    """The keys of the models' servers, and those of this server's clients."""
    variables = (model.api_key_env for model in settings.models.values())
    own = (key.get_secret_value() for key in settings.server.api_keys)
    return [*filter(None, (os.environ.get(name or "") for name in variables)), *own]
