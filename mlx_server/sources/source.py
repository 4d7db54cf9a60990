"""Resolves a model's or adapter's source: a local folder, a hub id, or the demo model."""

import os
from pathlib import Path

from mlx_server.errors import ModelUnusable, SettingsError
from mlx_server.models.adapter_config import CONFIG as ADAPTER_CONFIG
from mlx_server.models.checkpoint import check_architecture
from mlx_server.models.files import check_model, missing, read_json, weights_instead
from mlx_server.sources import hub
from mlx_server.sources.cache import Progress
from mlx_server.sources.hub import HubModel, cached, cached_adapter, fetch_adapter, fetch_model
from mlx_server.sources.kinds import DEMO, HUB_ID, KINDS, why_impossible


def resolve(
    source: str, progress: Progress, *, revision: str | None = None, budget: int | None = None
) -> Path:
    """Returns a local folder with config.json, a tokenizer and weights; fetches it if need be.

    It may block for minutes while it fetches. Raises SettingsError if the kind of `source` is
    unknown, ModelUnusable if its files are missing or can't be fetched, and NotEnoughMemory if
    weights to be fetched would take more than `budget` bytes.
    """
    if source == DEMO:
        # imported here because it needs numpy and gguf, which no other source does
        from mlx_server.sources.demo import demo_checkpoint

        return demo_checkpoint(progress)
    if id := _hub_id(source):
        return fetch_model(HubModel(id, revision, budget), progress)
    folder = Path(os.path.expanduser(source))
    if source and os.path.exists(folder):
        return _local(folder)
    if why := why_impossible(source):
        raise SettingsError(why)
    raise ModelUnusable(f"The folder {folder.name!r} does not exist. Use {KINDS}.")


def _hub_id(source: str) -> str | None:
    """The hub id that a source names; None for a folder, which goes before an id of its name."""
    prefixed = source.removeprefix("hf:")
    is_path = os.path.exists(os.path.expanduser(source)) or source.startswith((".", "~"))
    is_id = HUB_ID.fullmatch(prefixed) and (prefixed != source or not is_path)
    return prefixed if is_id else None


def check(source: str, revision: str | None = None) -> None:
    """Raises those errors of `resolve` that can be found without downloading weights."""
    if id := _hub_id(source):
        hub.check(HubModel(id, revision))
    elif source != DEMO:
        folder = resolve(source, lambda *progress: None)
        check_architecture(read_json(folder / "config.json"), folder.name)


def on_disk(source: str, revision: str | None = None) -> Path | None:
    """The folder that `resolve` would return; None if it would have to be fetched first."""
    if source == DEMO:
        from mlx_server.sources.demo import made_checkpoint

        return made_checkpoint()
    folder = Path(os.path.expanduser(source))
    if os.path.isdir(folder):
        return folder.resolve()
    from huggingface_hub.errors import HFValidationError

    id = _hub_id(source)
    try:
        return cached(id, revision) if id else None
    except HFValidationError:
        return None


def resolve_adapter(source: str, progress: Progress) -> Path:
    """Returns an adapter's folder, unread; fetches it first if `source` is a hub id.

    It may block for long. Raises AdapterInvalid if it can't be fetched.
    """
    if (folder := adapter_on_disk(source)) is not None:
        return folder
    return fetch_adapter(source.removeprefix("hf:"), progress)


def adapter_on_disk(source: str) -> Path | None:
    """Returns an adapter's folder; None: `source` is a hub id that the local cache lacks."""
    name = source.removeprefix("hf:")
    return cached_adapter(name) if HUB_ID.fullmatch(name) else Path(source)


COMPLETE = "Copy the missing files, or make an MLX checkpoint with `mlx_lm.convert`"
SAFETENSORS = "use a checkpoint in safetensors, for example from mlx-community on the hub"


def _local(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelUnusable(
            f"{folder.name!r} is a file. Name a checkpoint folder that contains config.json, "
            f"tokenizer.json and model*.safetensors; for a GGUF or PyTorch file {SAFETENSORS}."
        )
    if lacking := missing(folder):
        other = weights_instead(folder)
        advice = f"{other} is not read: {SAFETENSORS}" if other else COMPLETE
        if (folder / ADAPTER_CONFIG).is_file():
            advice = "It is a LoRA adapter: put its folder in adapters/, and serve its base model"
        raise ModelUnusable(
            f"The checkpoint in {folder.name!r} lacks {', '.join(lacking)}. {advice}."
        )
    folder = folder.resolve()
    check_model(folder)
    return folder
