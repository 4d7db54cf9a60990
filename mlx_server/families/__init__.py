"""The table of model families. A checkpoint belongs to the first that recognises it."""

import logging

from mlx_server.errors import SettingsError
from mlx_server.families.base import ModelFamily
from mlx_server.families.checkpoint import Checkpoint
from mlx_server.families.plain import PLAIN
from mlx_server.families.smollm2 import SMOLLM2

log = logging.getLogger("mlx_server.families")

FAMILIES: tuple[ModelFamily, ...] = (SMOLLM2, PLAIN)


def family_of(checkpoint: Checkpoint, named: str | None = None) -> ModelFamily:
    """named: `family:` in models.yaml, which settles it."""
    if named is not None:
        return family_named(named)
    found = next((family for family in FAMILIES if family.recognises(checkpoint)), None)
    if found is None:
        log.info(
            "model type %r belongs to no known family: using its own chat template, plain text",
            checkpoint.model_type,
        )
    return found or PLAIN


def family_named(name: str) -> ModelFamily:
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise SettingsError(f"There is no model family {name!r}. Known families: {known}.")
