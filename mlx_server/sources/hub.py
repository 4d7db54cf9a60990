"""Models and adapters of the Hugging Face hub, checked before their weights are downloaded."""

import difflib
import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Self

import httpx2

from mlx_server import limits
from mlx_server.errors import (
    AdapterInvalid,
    ModelUnusable,
    NotEnoughMemory,
    ServerError,
    SettingsError,
    public_message,
)
from mlx_server.models.adapter_config import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS
from mlx_server.models.checkpoint import check_architecture
from mlx_server.models.files import check_model, missing, missing_of, read_json
from mlx_server.models.tokenizer import read_tokenizer
from mlx_server.sources.cache import Progress
from mlx_server.sources.kinds import HUB_ID
from mlx_server.sources.tokenizer_files import tokenizer_json

# The hub client reads this when it is first imported, and so does the engine process.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

log = logging.getLogger("mlx_server.pool")

SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
NEEDED = ["*.json", "*.jinja", "*.model", "model*.safetensors"]
WANTED = [*SMALL, "model*.safetensors"]
ADAPTER_FILES = [CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS]

NESTED = ["[!1a]*/*", "a[!d]*/*"]
"""What is not fetched: subfolders hold the model in other formats, and the `*` of a pattern matches
a "/" too. `1_Pooling` of sentence-transformers and `additional_chat_templates` are exceptions."""

LISTED = 5
"""The number of models or revisions that an error suggests."""


@dataclass(frozen=True)
class HubModel:
    """A model on the hub, and the bound on its size."""

    name: str
    revision: str | None = None
    """A branch, tag or commit; None: the newest commit."""
    budget: int | None = None
    """Bytes of memory that its weights may take; None: no bound."""


def fetch_model(model: HubModel, progress: Progress) -> Path:
    """Returns the model's folder; downloads it first if need be.

    Raises SettingsError, ModelUnusable or NotEnoughMemory.
    """
    name = model.name
    if not HUB_ID.fullmatch(name):
        raise SettingsError(f"{name!r} is not a hub id. Write hf:org/name.")
    try:
        folder = cached(name, model.revision) or _download(model, progress)
    except ServerError:
        raise
    except Exception as error:  # each layer of the hub client raises errors of its own kind
        raise _unusable(model, error) from error
    if lacking := missing(folder):
        raise ModelUnusable(_lacks(name, lacking))
    check_model(folder)
    return folder


def cached(name: str, revision: str | None = None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            local_files_only=True,
            allow_patterns=NEEDED,
            ignore_patterns=NESTED,
        )
    except LocalEntryNotFoundError:
        return None
    # The client detects an interrupted download only by a file list that its older versions don't
    # keep.
    return None if missing(Path(folder)) else Path(folder)


def fetch_adapter(name: str, progress: Progress) -> Path:
    model = HubModel(name)
    try:
        _, files = _announced(model, ADAPTER_FILES[:1], ADAPTER_FILES)
        _check_disk(model, files)
        return _fetched(model, ADAPTER_FILES, files, progress)
    except ServerError as error:
        raise AdapterInvalid(error.message) from error
    except Exception as error:  # each layer of the hub client raises errors of its own kind
        raise AdapterInvalid(f"Can't get {name} from the hub: {_fix(model, error)}") from error


def cached_adapter(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=ADAPTER_FILES))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    has_weights = any((folder / file).is_file() for file in ADAPTER_FILES[1:])
    return folder if has_weights and (folder / ADAPTER_FILES[0]).is_file() else None


def check(model: HubModel) -> None:
    """Fetches the small files only; raises the errors of `fetch_model` that they reveal."""
    try:
        if cached(model.name, model.revision) is None:
            _checked(model)
    except ServerError:
        raise
    except Exception as error:  # each layer of the hub client raises errors of its own kind
        raise _unusable(model, error) from error


def _download(model: HubModel, progress: Progress) -> Path:
    from huggingface_hub import is_offline_mode

    folder, files = _checked(model)
    if is_offline_mode():
        return folder  # offline, only the cached files are available
    return _fetched(model, WANTED, files, progress)


def _checked(model: HubModel) -> tuple[Path, Sequence[Any]]:
    """Fetches the small files and checks that the weights can be fetched and used. Returns what
    `_announced` does."""
    from huggingface_hub import is_offline_mode

    if not is_offline_mode():
        _check_responds(model)
    folder, files = _announced(model, SMALL, WANTED)
    if is_offline_mode():
        return folder, files
    if lacking := missing_of(file.filename for file in files):
        raise ModelUnusable(_lacks(model.name, lacking))
    check_small_files(folder, model.name)
    _check_memory(model, files)
    _check_disk(model, files)
    return folder, files


def check_small_files(folder: Path, name: str) -> None:
    """Raises ModelUnusable if the small files show that the model can't be used."""
    check_model(folder)
    check_architecture(read_json(folder / "config.json"), name)
    read_tokenizer(tokenizer_json(folder))


def _announced(
    model: HubModel, small: list[str], patterns: list[str]
) -> tuple[Path, Sequence[Any]]:
    """Fetches the small files. Returns their folder, and what the hub says of all files; offline it
    says nothing."""
    from huggingface_hub import is_offline_mode

    check_answers()
    bar: Any = partial(_Bar, lambda done, total: None, limits.SMALL_FILES_BYTES)
    folder = Path(_snapshot(model, small, tqdm_class=bar))
    if is_offline_mode():
        return folder, ()
    return folder, _snapshot(model, patterns, dry_run=True, tqdm_class=bar)


def _fetched(
    model: HubModel, patterns: list[str], files: Sequence[Any], progress: Progress
) -> Path:
    bar: Any = partial(_Bar, partial(progress, f"downloading {model.name}"), _most_bytes(files))
    return Path(_snapshot(model, patterns, tqdm_class=bar))


def _check_responds(model: HubModel) -> None:
    """Fails if the hub accepts a connection but never responds: the client sets no timeout."""
    from huggingface_hub import HfApi, constants

    seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        HfApi().model_info(model.name, revision=model.revision, timeout=seconds)
    except httpx2.TimeoutException:
        raise ModelUnusable(
            f"Can't get {model.name} from the hub: it did not respond within {seconds} seconds. "
            "Check the network, or set HF_HUB_DOWNLOAD_TIMEOUT to wait longer."
        ) from None
    except Exception:
        log.debug("the download reports this error in more detail", exc_info=True)


def _snapshot(model: HubModel, patterns: list[str], **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    return snapshot_download(
        model.name,
        revision=model.revision,
        allow_patterns=patterns,
        ignore_patterns=NESTED,
        **options,
    )


def _check_memory(model: HubModel, files: Sequence[Any]) -> None:
    needed = sum(f.file_size or 0 for f in files if f.filename.endswith(".safetensors"))
    if model.budget is not None and needed > model.budget:
        raise NotEnoughMemory(
            f"{model.name} was not downloaded: its weights take {_size(needed)}, and the memory "
            f"budget is {_size(model.budget)}. Use a smaller quantization of it, or raise "
            "`memory_budget` under `server` in models.yaml; `mlx-server doctor` says where the "
            "budget comes from."
        )


def _check_disk(model: HubModel, files: Sequence[Any]) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = Path(HF_HUB_CACHE) / f"models--{model.name.replace('/', '--')}"
    needed = sum(size or 0 for size in _sizes(files)) - _begun(repository)
    free = shutil.disk_usage(HF_HUB_CACHE).free
    if needed > free:
        raise ModelUnusable(
            f"{model.name} was not downloaded: {_size(needed)} are left to fetch, and the disk "
            f"of the Hugging Face cache has {_size(free)} free. Free some space, or set HF_HOME to "
            "a folder on another disk."
        )


def _most_bytes(files: Sequence[Any]) -> int:
    """The most bytes that the hub may send: twice what it announces, since a file that is begun
    again may be counted twice. If it does not say all sizes, it is what the disk has free."""
    from huggingface_hub.constants import HF_HUB_CACHE

    sizes = _sizes(files)
    known = [size for size in sizes if size is not None]
    return 2 * sum(known) if known == sizes else shutil.disk_usage(HF_HUB_CACHE).free


def _sizes(files: Sequence[Any]) -> list[int | None]:
    """The sizes of the files that are not in the cache, as far as the hub says them."""
    return [file.file_size for file in files if file.will_download]


def _begun(repository: Path) -> int:
    """The bytes of unfinished files that an earlier download left."""
    return sum(path.stat().st_size for path in repository.glob("blobs/*.incomplete"))


class _Bar:
    """The part of tqdm's interface that the hub client uses. It ends a download of too many bytes:
    the hub client compares a file's size with the announced one only when the file has ended.

    tqdm itself would keep its lock when a progress report raises.
    """

    format_dict: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        report: Callable[[int, int], None],
        most: int,
        desc: str = "",
        total: int = 0,
        **_: Any,
    ) -> None:
        # This bar counts bytes on disk; the others count files or bytes on the wire.
        self._counts = desc.startswith("Reconstructing")
        self._report, self._most = report, most
        self._lock = Lock()
        self.n, self.total = 0, total

    def update(self, n: int | float | None = 1) -> None:
        with self._lock:  # files are fetched in several threads
            self.n += int(n or 0)
            self._check(self.n)
            if self._counts and self.total:
                self._report(min(self.n, self.total), self.total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def refresh(self) -> None:
        """Checks the total, to which the hub client has added the size of one more file."""
        self._check(self.total)

    def _check(self, nbytes: int) -> None:
        if self._counts and nbytes > self._most:
            raise ModelUnusable(
                f"The hub sends {_size(nbytes)}, and these files may have {_size(self._most)} at "
                "most. Check the list of files on the hub."
            )

    def set_description(self, *_: Any, **__: Any) -> None: ...
    def set_description_str(self, *_: Any, **__: Any) -> None: ...
    def set_postfix_str(self, *_: Any, **__: Any) -> None: ...


def _unusable(model: HubModel, error: Exception) -> ModelUnusable:
    return ModelUnusable(f"Can't get {model.name} from the hub: {_fix(model, error)}")


def _lacks(name: str, lacking: list[str]) -> str:
    return (
        f"{name} has no {', '.join(lacking)}, neither in the local cache nor on the hub. "
        "Use an MLX checkpoint of the model, for example from mlx-community. If hub access is "
        f"off (HF_HUB_OFFLINE), fetch the missing files with `hf download {name}`."
    )


def _fix(model: HubModel, error: Exception) -> str:
    from huggingface_hub import errors, is_offline_mode

    name = model.name
    cause = error.__cause__ or error
    match error:
        case errors.GatedRepoError():
            return (
                f"it is gated. Accept its terms on https://huggingface.co/{name}, "
                "then run `hf auth login` or set HF_TOKEN."
            )
        case errors.RepositoryNotFoundError():
            return (
                "it does not exist there, or is private (and there is no such local folder). "
                f"Check the spelling{_nearest(name)}; for a private model run `hf auth login` or "
                "set HF_TOKEN."
            )
        case errors.RevisionNotFoundError():
            return (
                f"it has no revision {str(model.revision)[:100]!r}. "
                f"Set `revision:` to a branch, a tag or a commit of it{_revisions(name)}."
            )
        case errors.LocalEntryNotFoundError() if is_offline_mode():
            return (
                "the local cache does not have all its files, and HF_HUB_OFFLINE is set. "
                f"Unset it, or run `hf download {name}` while online."
            )
        case errors.LocalEntryNotFoundError() if (message := _status_message(cause)) is not None:
            return message
        case errors.LocalEntryNotFoundError():
            return (
                "the local cache does not have all its files, and the hub can't be reached "
                f"({public_message(cause)}). Check the network, or give the path of a local folder."
            )
        case OSError(errno=errno.ENOSPC):
            return (
                "the disk of the Hugging Face cache is full. Free some space, or set HF_HOME to a "
                "folder on another disk. Files that were fetched are kept."
            )
        case _:
            refused = _status_message(error)
            return (
                refused
                or f"{public_message(error)}. Check the network and the disk, and try again."
            )


def _status_message(error: BaseException) -> str | None:
    """Explains a status of the hub for which the client has no error class."""
    from huggingface_hub import errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    match status:
        case 401 | 403:
            return (
                f"the hub denies access (status {status}). Set HF_TOKEN to a token with read "
                "access, or run `hf auth login`."
            )
        case 429:
            return "the hub's rate limit is reached. Wait a little, or set HF_TOKEN."
        case _:
            return None


def _nearest(name: str) -> str:
    """Suggests models of the same owner with a similar name."""
    from huggingface_hub import HfApi

    owner, _, model = name.partition("/")
    with suppress(Exception):  # it is a hint
        listed = [entry.id for entry in HfApi().list_models(author=owner, limit=1000)]
        alike = difflib.get_close_matches(f"{owner}/{model}", listed, LISTED, 0.6)
        return f" (similar names: {', '.join(alike)})" if alike else ""
    return ""


def _revisions(name: str) -> str:
    from huggingface_hub import HfApi

    with suppress(Exception):  # it is a hint
        refs = HfApi().list_repo_refs(name)
        listed = [ref.name for ref in (*refs.branches, *refs.tags)][:LISTED]
        return f", such as {', '.join(listed)}" if listed else ""
    return ""


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


NAMES = ("ETag", "X-Linked-Etag", "X-Repo-Commit")
"""The headers of a file that become names in the cache."""


PAUSES = ("Retry-After", "RateLimit")
"""The headers for which the hub client would wait as long as they say, before it tries again. It
waits some seconds where there is none, and gives up after a few tries."""


class _Read(threading.local):
    nbytes = 0
    """Of the answers that this thread has read whole since `check_answers`."""


_read = _Read()


def check_answers() -> None:
    """Makes the hub client's HTTP client check each answer, from now on, and counts anew the bytes
    of those to this thread's requests."""
    _read.nbytes = 0
    _use_client()


@cache
def _use_client() -> None:
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import hf_request_event_hook

    hooks: dict[str, list[Callable[..., Any]]] = {
        "request": [hf_request_event_hook],
        "response": [_check_headers],
    }
    # as the hub client itself makes it; redirected requests go through the hooks too
    set_client_factory(lambda: _HubClient(event_hooks=hooks, follow_redirects=True, timeout=None))


class _HubClient(httpx2.Client):
    """Checks the answers of which the hub client makes paths: a commit or a content called
    `../../x` would lead out of its cache. It bounds those that the hub client reads whole."""

    def send(
        self, request: httpx2.Request, *, stream: bool = False, **options: Any
    ) -> httpx2.Response:
        """Files are streamed, and counted by their reader. All else is read whole."""
        response = super().send(request, stream=True, **options)
        if stream and not response.is_error:
            return response
        try:
            response = _whole(response)
        finally:
            response.close()
        for name in _listed(response):
            _check(name)
        return response


def _whole(response: httpx2.Response) -> httpx2.Response:
    body, most = bytearray(), limits.HUB_LIST_BYTES
    for piece in response.iter_bytes():
        body += piece
        _read.nbytes += len(piece)
        if _read.nbytes > most:
            raise ModelUnusable(
                f"The hub says more than {most >> 20} MiB about one repository, so nothing is "
                "fetched. Check the hub that HF_ENDPOINT names."
            )
    headers = response.headers.copy()
    headers.pop("Content-Encoding", None)  # it is decoded
    for name in PAUSES:
        if _asks_for_too_long(headers.get(name, "")):
            headers.pop(name, None)
    return httpx2.Response(
        response.status_code,
        headers=headers,
        content=bytes(body),
        request=response.request,
        extensions=response.extensions,
        history=response.history,
    )


def _asks_for_too_long(pause: str) -> bool:
    numbers = [int(number[:9]) for number in re.findall(r"\d+", pause.rpartition("t=")[2])]
    return not numbers or max(numbers) > limits.HUB_PAUSE_SECONDS


def _check_headers(response: httpx2.Response) -> None:
    if response.request.method == "HEAD":
        for name in NAMES:
            _check(response.headers.get(name))


def _listed(response: httpx2.Response) -> Iterator[Any]:
    """The commits and contents that an answer names, as far as it is well formed."""
    try:
        answer = response.json()
    except ValueError:
        return
    for each in answer if isinstance(answer, list) else [answer]:
        if isinstance(each, dict):
            yield each.get("sha")
            lfs = each.get("lfs")
            yield lfs.get("oid") if isinstance(lfs, dict) else None


def _check(name: Any) -> None:
    if isinstance(name, str) and _leads_elsewhere(name):
        raise ModelUnusable(
            f"The hub names a commit or a file {name[:100]!r}, which leads out of the cache, "
            "so nothing is fetched. Check the hub that HF_ENDPOINT names."
        )


def _leads_elsewhere(name: str) -> bool:
    plain = name.removeprefix("W/").strip('"')
    return "/" in plain or plain in ("", ".", "..")
