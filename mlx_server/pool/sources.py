"""Where the files of a model or adapter come from: a local folder, the hub, or the demo model."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Self

from mlx_server.errors import AdapterInvalid, ModelUnusable, SettingsError, told
from mlx_server.folders import check_model
from mlx_server.lora.config import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS
from mlx_server.pool.cache import Progress

# The hub client reads this when it is first imported, and so does the engine process.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

KINDS = "the path of a folder, a hub id such as mlx-community/Qwen3-0.6B-4bit, or demo:smollm2"

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")

NEEDED = ["*.json", "*.jinja", "model*.safetensors"]
WANTED = [*NEEDED, "*.txt", "*.model", "*.tiktoken"]
ADAPTER_FILES = [CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS]
# Subfolders hold the model in other formats, and the `*` of a pattern would reach into them.
NESTED = "*/*"


def resolve(source: str, progress: Progress) -> Path:
    """A local folder with config.json, tokenizer.json and weights, fetched if need be.

    It blocks, for minutes when there is much to fetch. Raises SettingsError when `source` is of
    no known kind, ModelUnusable when its files can't be had.
    """
    kind, colon, name = source.partition(":")
    if colon and kind == "demo":
        return _demo(name, progress)
    if colon and kind == "hf":
        return _from_hub(name, progress)
    folder = Path(os.path.expanduser(source))
    if source and os.path.exists(folder):
        return _local(folder)
    if HUB_ID.fullmatch(source) and not source.startswith((".", "~")):
        return _from_hub(source, progress)
    if not source or re.match(r"[a-z]\w*:", source):
        raise SettingsError(f"{source!r} is not a known kind of model source. Use {KINDS}.")
    raise ModelUnusable(f"There is no folder {folder.name!r} where it should be. Use {KINDS}.")


def on_disk(source: str) -> Path | None:
    """The folder that `resolve` would give, if it is there already; None: it would be fetched."""
    kind, colon, name = source.partition(":")
    if colon and kind == "demo":
        from mlx_server.pool.demo import made_checkpoint

        return made_checkpoint() if name == "smollm2" else None
    folder = Path(os.path.expanduser(source))
    if os.path.isdir(folder):
        return folder.resolve()
    from huggingface_hub.errors import HFValidationError

    hub_id = name if kind == "hf" else source
    try:
        return _cached(hub_id) if HUB_ID.fullmatch(hub_id) else None
    except HFValidationError:
        return None


def resolve_adapter(source: str, progress: Progress) -> Path:
    """An adapter's folder, fetched if it is a hub id. Raises AdapterInvalid when it can't be had.

    It may block for long. What is in the folder is not looked at.
    """
    if (folder := adapter_on_disk(source)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    name = source.removeprefix("hf:")
    bar: Any = partial(_Bar, partial(progress, f"downloading {name}"))
    try:
        return Path(snapshot_download(name, allow_patterns=ADAPTER_FILES, tqdm_class=bar))
    except Exception as error:  # each layer of the hub client raises errors of its own kind
        raise AdapterInvalid(f"Can't get {name} from the hub: {_fix(name, error)}") from error


def adapter_on_disk(source: str) -> Path | None:
    """An adapter's folder; None: it is a hub id, and not in the local cache."""
    name = source.removeprefix("hf:")
    if not HUB_ID.fullmatch(name):
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(name, local_files_only=True, allow_patterns=ADAPTER_FILES))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    has_weights = any((found / file).is_file() for file in ADAPTER_FILES[1:])
    return found if has_weights and (found / ADAPTER_FILES[0]).is_file() else None


def _demo(name: str, progress: Progress) -> Path:
    if name != "smollm2":
        raise SettingsError(f"There is no demo model {name!r}; the only one is demo:smollm2.")
    from mlx_server.pool.demo import demo_checkpoint  # numpy and gguf, which no other source needs

    return demo_checkpoint(progress)


def _local(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelUnusable(
            f"{folder.name!r} is a file. Give the folder of a checkpoint, with config.json, "
            "tokenizer.json and model*.safetensors in it."
        )
    if missing := _missing(folder):
        raise ModelUnusable(
            f"The checkpoint in {folder.name!r} lacks {', '.join(missing)}. Copy what is "
            "missing, or make an MLX checkpoint with `mlx_lm.convert`."
        )
    folder = folder.resolve()
    check_model(folder)
    return folder


def _missing(folder: Path) -> list[str]:
    files = [path.name for path in folder.glob("model*.safetensors") if path.is_file()]
    shards = {
        f"{shard[1]}-{number:05}-of-{shard[2]}.safetensors"
        for shard in map(SHARD.fullmatch, files)
        if shard
        for number in range(1, int(shard[2]) + 1)
    }
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    return missing + sorted(shards.difference(files)) + ([] if files else ["model*.safetensors"])


def _from_hub(name: str, progress: Progress) -> Path:
    if not HUB_ID.fullmatch(name):
        raise SettingsError(f"{name!r} is not a hub id. Write hf:org/name.")
    try:
        folder = _cached(name) or _download(name, progress)
    except Exception as error:  # each layer of the hub client raises errors of its own kind
        raise ModelUnusable(f"Can't get {name} from the hub: {_fix(name, error)}") from error
    if missing := _missing(folder):
        raise ModelUnusable(
            f"{name} has no {', '.join(missing)}, neither here nor where it came from. "
            "Use an MLX checkpoint of the model, such as those of mlx-community; if hub access "
            f"is off (HF_HUB_OFFLINE), fetch the rest with `hf download {name}`."
        )
    check_model(folder)
    return folder


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name, local_files_only=True, allow_patterns=NEEDED, ignore_patterns=NESTED
        )
    except LocalEntryNotFoundError:
        return None
    # The client can tell an interrupted download only from a file list that older ones don't keep.
    return None if _missing(Path(folder)) else Path(folder)


def _download(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    bar: Any = partial(_Bar, partial(progress, f"downloading {name}"))
    folder = snapshot_download(name, allow_patterns=WANTED, ignore_patterns=NESTED, tqdm_class=bar)
    return Path(folder)


class _Bar:
    """As much of tqdm as the hub client uses. A real bar keeps its lock when a report raises."""

    format_dict: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, report: Callable[[int, int], None], desc: str = "", total: int = 0, **_: Any
    ) -> None:
        # Other bars count files, and the bytes on the wire; this one the bytes on disk.
        self._counts = desc.startswith("Reconstructing")
        self._report = report
        self._lock = Lock()
        self.n, self.total = 0, total

    def update(self, n: int | float | None = 1) -> None:
        with self._lock:  # files are fetched in several threads
            self.n += int(n or 0)
            if self._counts and self.total:
                self._report(min(self.n, self.total), self.total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def refresh(self) -> None: ...
    def set_description(self, *_: Any, **__: Any) -> None: ...
    def set_description_str(self, *_: Any, **__: Any) -> None: ...
    def set_postfix_str(self, *_: Any, **__: Any) -> None: ...


def _fix(name: str, error: Exception) -> str:
    from huggingface_hub import errors, is_offline_mode

    match error:
        case errors.GatedRepoError():
            return (
                f"it is gated. Accept its terms on https://huggingface.co/{name}, "
                "then run `hf auth login` or set HF_TOKEN."
            )
        case errors.RepositoryNotFoundError():
            return (
                "there is no such model, or it is private (and there is no such folder here). "
                "Check the spelling; for a private one run `hf auth login` or set HF_TOKEN."
            )
        case errors.LocalEntryNotFoundError() if is_offline_mode():
            return (
                "it is not, or not all, in the local cache, and HF_HUB_OFFLINE is set. "
                f"Unset it, or run `hf download {name}` where there is a network."
            )
        case errors.LocalEntryNotFoundError():
            return (
                "it is not, or not all, in the local cache, and the hub can't be reached "
                f"({told(error.__cause__ or error)}). Check the network, or give the path of a "
                "local folder."
            )
        case _:
            return f"{told(error)}. Check the network and the disk, and try again."
