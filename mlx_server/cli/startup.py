"""Checks the models named on the command line before anything is started."""

import logging
from collections.abc import Sequence

from mlx_server.config.models_yaml import ids_of
from mlx_server.config.settings import REPLAY, ModelSettings, Settings
from mlx_server.errors import ServerError, SettingsError
from mlx_server.sources.source import check
from mlx_server.upstream.spec import is_upstream

log = logging.getLogger("mlx_server")


def check_named(settings: Settings, named: Sequence[str]) -> None:
    """Checks `named`, paths and ids from the command line. Raises SettingsError if none of them can
    be served; otherwise logs those that can't, since they may be fixed while the server runs."""
    problems = {id: _problem(settings.models[id]) for id in ids_of(named)}
    wrong = {id: problem for id, problem in problems.items() if problem is not None}
    if wrong and len(wrong) == len(named):
        raise SettingsError("\n".join(f"{id}: {problem}" for id, problem in wrong.items()))
    for id, problem in wrong.items():
        log.warning("%s can't be served: %s", id, problem)


def _problem(model: ModelSettings) -> str | None:
    if model.source.startswith(REPLAY) or is_upstream(model.source):
        return None
    try:
        check(model.source, model.revision)
    except ServerError as error:
        return error.message
    return None
