"""Reads a checkpoint's JSON files: those that it needs, and those that are optional."""

import json
import logging
from pathlib import Path
from typing import Any

from mlx_server.checkpoints.file_kind import AGAIN, read_own
from mlx_server.errors import ModelUnusable, public_message

log = logging.getLogger("mlx_server.families")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, with or without a byte order mark. Raises ModelUnusable."""
    try:
        found = json.loads(read_own(existing(path)), object_pairs_hook=_made)
    except OSError as error:
        raise ModelUnusable(f"{path.name} can't be read: {public_message(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path.name} is not valid JSON: {error}. {AGAIN}.") from None
    if not isinstance(found, dict):
        raise ModelUnusable(f"{path.name} must contain a JSON object. {AGAIN}.")
    return found


def _made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object as `json` does, but in Python, where other threads get their turn."""
    return dict(pairs)


def read_optional_json(path: Path) -> dict[str, Any]:
    """Like `read_json`; empty if there is no such file, or with a warning if it is damaged."""
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except ModelUnusable as error:
        folder = path.parent.name
        log.warning("%s The model in %r is used without this file.", error.message, folder)
        return {}


def existing(path: Path) -> Path:
    """The path of a file. Raises ModelUnusable if there is none."""
    if not path.is_file():
        raise ModelUnusable(
            f"{path.name} is missing from the model's folder {path.parent.name!r}. "
            "Download the model again, or convert it with `mlx_lm.convert`."
        )
    return path
