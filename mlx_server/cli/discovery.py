"""`mlx-server serve --discover`: the checkpoints on this machine are served too."""

import sys

from mlx_server.cli.machine_checks import budget_here
from mlx_server.config.settings import ModelSettings, Settings
from mlx_server.sources.local import local_models


def with_local_models(settings: Settings) -> Settings:
    """Adds the local checkpoints that fit the memory budget; listed models keep their names."""
    budget = budget_here(settings.server.memory_budget).nbytes
    listed = settings.models
    taken = {*listed, *(alias for model in listed.values() for alias in model.aliases)}
    taken |= {model.source for model in listed.values()}
    found = {
        model.id: ModelSettings(source=model.source)
        for model in local_models(upcast=sys.platform != "darwin")
        if not model.problem and model.nbytes <= budget and not {model.id, model.source} & taken
    }
    return settings.model_copy(update={"models": {**listed, **found}})
