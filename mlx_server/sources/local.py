"""Checkpoints that are already on this machine: in the Hugging Face cache and LM Studio's folders.

Nothing is fetched, and only the small files of each checkpoint are read.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_server.errors import ServerError, public_message
from mlx_server.families import family_of
from mlx_server.models.checkpoint import check_architecture, read_checkpoint
from mlx_server.models.files import weights_bytes
from mlx_server.sources.source import resolve
from mlx_server.sources.tokenizer_files import tokenizer_json

LM_STUDIO_POINTER = ".lmstudio-home-pointer"
"""A file in the user's home that names the folder which LM Studio uses."""

LM_STUDIO_HOMES = (".lmstudio", ".cache/lm-studio")
"""Folders in the user's home where LM Studio, and its older versions, keep their files."""


@dataclass(frozen=True)
class LocalModel:
    id: str
    """The organisation and model, as in a hub id."""
    source: str
    """The value for `source:` in models.yaml."""
    family: str = "-"
    nbytes: int = 0
    """The bytes that its weights take in memory."""
    problem: str = ""
    """Why it can't be served; empty if it can."""


def local_models(*, upcast: bool) -> Iterator[LocalModel]:
    """upcast: half precision will be loaded as float32, as on a CPU."""
    folders: set[Path] = set()
    for model, folder in sorted(_candidates(), key=lambda found: found[0].id.lower()):
        if (resolved := folder.resolve()) not in folders:
            folders.add(resolved)
            yield _described(model, folder, upcast)


def problem_of(name: str, folder: Path) -> str:
    """Why the model in a folder can't be served; empty if it can."""
    return _described(LocalModel(name, str(folder)), folder, upcast=False).problem


def _candidates() -> Iterator[tuple[LocalModel, Path]]:
    """The folders that may hold a checkpoint."""
    for model, folder in (*_in_hub_cache(), *_in_folders(_lm_studio_folders())):
        if model.id.isprintable() and (folder / "config.json").is_file():
            yield model, folder


def _in_hub_cache() -> Iterator[tuple[LocalModel, Path]]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError, OSError):  # it is no folder, or can't be read
        return
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            try:
                validate_repo_id(repository.repo_id)
            except HFValidationError:  # no hub's: as a source, `../..` would be a folder
                continue
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            yield LocalModel(repository.repo_id, repository.repo_id), newest.snapshot_path


def _in_folders(roots: Iterable[Path]) -> Iterator[tuple[LocalModel, Path]]:
    """LM Studio keeps models in folders named PUBLISHER/MODEL."""
    for root in roots:
        for folder in root.glob("*/*"):
            yield LocalModel(f"{folder.parent.name}/{folder.name}", str(folder)), folder


def _lm_studio_folders() -> list[Path]:
    home = Path.home()
    homes = [home / name for name in LM_STUDIO_HOMES]
    with suppress(OSError, UnicodeDecodeError):
        homes.insert(0, Path((home / LM_STUDIO_POINTER).read_text("utf-8").strip()))
    return list(dict.fromkeys(folder / "models" for folder in homes if os.path.isabs(folder)))


def _described(model: LocalModel, folder: Path, upcast: bool) -> LocalModel:
    try:
        folder = resolve(str(folder), lambda *progress: None)
        checkpoint = read_checkpoint(folder, tokenizer_json=tokenizer_json(folder))
        check_architecture(checkpoint.config, model.id)
        family = family_of(checkpoint).name
        return replace(model, family=family, nbytes=weights_bytes(folder, upcast))
    except ServerError as error:
        return replace(model, problem=error.message)
    except OSError as error:
        return replace(model, problem=public_message(error))
