"""The settings of `serve`, checked before anything is started."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mlx_server.cli.machine_checks import budget_here, check_transcripts
from mlx_server.config.models_yaml import find_file, ids_of, load_settings, misspelt_variables
from mlx_server.config.settings import REPLAY, ModelSettings, Settings
from mlx_server.errors import ServerError, SettingsError
from mlx_server.sources.local import local_models
from mlx_server.sources.source import check
from mlx_server.upstream.spec import is_upstream

log = logging.getLogger("mlx_server")


def checked_settings(
    config: Path | None,
    models: Sequence[str],
    overrides: Mapping[str, object],
    hostfile: Path | None,
    *,
    discover: bool,
) -> Settings:
    settings = load_settings(config, models=models, overrides=overrides, hostfile=hostfile)
    if discover:
        settings = with_local_models(settings)
    check_transcripts(settings)
    for each in misspelt_variables():
        log.warning(each)
    if not (models or find_file(config)):
        log.info("no models.yaml is here: the demo model is served; `mlx-server init` writes one")
    if models:
        check_named(settings, models)
    for id in settings.models.keys() - set(ids_of(models)):
        for problem in _problems_on_disk(settings.models[id]):
            log.warning("%s can't be served: %s", id, problem)
    return settings


def check_named(settings: Settings, named: Sequence[str]) -> None:
    """Checks `named`, paths and ids from the command line. Raises SettingsError if none of them can
    be served; otherwise logs those that can't, since they may be fixed while the server runs."""
    problems = {id: _problem(settings.models[id]) for id in ids_of(named)}
    wrong = {id: problem for id, problem in problems.items() if problem is not None}
    if wrong and len(wrong) == len(named):
        raise SettingsError("\n".join(f"{id}: {problem}" for id, problem in wrong.items()))
    for id, problem in wrong.items():
        log.warning("%s can't be served: %s", id, problem)


def _problems_on_disk(model: ModelSettings) -> Iterator[str]:
    """What is wrong with the folders that it names, found without a network."""
    if os.path.isabs(model.source) and (problem := _problem(model)):
        yield problem
    for name, adapter in model.adapters.items():
        if os.path.isabs(adapter.path) and not os.path.isdir(adapter.path):
            folder = os.path.basename(adapter.path)
            yield f"its adapter {name!r} is not there: the folder {folder!r} does not exist."


def _problem(model: ModelSettings) -> str | None:
    if model.source.startswith(REPLAY) or is_upstream(model.source):
        return None
    try:
        check(model.source, model.revision)
    except ServerError as error:
        return error.message
    return None


def with_local_models(settings: Settings) -> Settings:
    """Adds the local checkpoints that fit the memory budget; listed models keep their names."""
    budget = budget_here(settings.server.memory_budget).nbytes
    listed = settings.models
    taken = {*listed, *(alias for model in listed.values() for alias in model.aliases)}
    taken |= {model.source for model in listed.values()}
    local = {
        model.id: ModelSettings(source=model.source)
        for model in local_models(upcast=sys.platform != "darwin")
        if not model.problem and model.nbytes <= budget and not {model.id, model.source} & taken
    }
    return replace(settings, models={**listed, **local})
