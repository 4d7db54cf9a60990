"""Resolves a source in a process whose environment names the hub, which its client reads once."""

import sys
from collections.abc import Mapping
from typing import Any

from mlx_server import limits
from mlx_server.errors import ServerError
from mlx_server.sources import source as sources


def resolved(
    source: str, function: str, options: Mapping[str, Any], lowered: Mapping[str, int]
) -> dict[str, Any]:
    """The answer of a function of `sources`, or its error, and what was imported for it.

    lowered: limits and their values in this process. "each": resolves several sources.
    """
    if function == "each":
        return {"answers": [resolved(one, "resolve", options, lowered) for one in source.split()]}
    for name, value in lowered.items():
        setattr(limits, name, value)
    reports: list[list[object]] = []
    answer: dict[str, Any]
    try:
        resolve = getattr(sources, function)
        folder = resolve(source, lambda *report: reports.append([*report]), **options)
        answer = {"folder": str(folder)}
    except ServerError as error:
        answer = {"error": type(error).__name__, "message": error.message}
    from huggingface_hub import constants

    heavy = [name for name in ("mlx", "mlx_lm", "torch", "transformers") if name in sys.modules]
    return {
        **answer,
        "reports": reports,
        "heavy": heavy,
        "quiet": constants.HF_HUB_DISABLE_TELEMETRY,
    }
