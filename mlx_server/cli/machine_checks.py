"""Whether this machine can serve, and what to do if it can't: one line for each check.

The lines are made for bug reports: none of them shows a key.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic_core import to_jsonable_python

from mlx_server.config.models_yaml import check_file, find_file, load_settings
from mlx_server.config.settings import REPLAY, ModelSettings, ServerSettings, Settings, values
from mlx_server.engine.engine_process import fast_blas
from mlx_server.engine.wired_memory import MOST_SHARE, WORTH_SHARE
from mlx_server.errors import AnswerUnwritable, ServerError, SettingsError
from mlx_server.families import family_named
from mlx_server.mcp.limits import NoProgram
from mlx_server.pool.memory import MemoryBudget, memory_budget, size
from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare
from mlx_server.sources.cache import cache_dir
from mlx_server.sources.local import problem_of
from mlx_server.sources.source import on_disk
from mlx_server.sources.transcript import TranscriptFile, read_file
from mlx_server.system import descriptors
from mlx_server.system.listening_sockets import bound_sockets


@dataclass(frozen=True)
class TranscriptCheck:
    """The check of one replay model."""

    model: str
    file: str
    entries: int
    problems: list[str]


def check_transcripts(settings: Settings) -> None:
    """Raises SettingsError with every mistake, each with the file and its line."""
    problems: dict[str, str] = {}
    for check in transcript_checks(settings):
        for problem in check.problems:
            problems.setdefault(problem, check.model)  # models may share a file
    if problems:
        raise SettingsError("\n".join(f"{id}: {problem}" for problem, id in problems.items()))


def transcript_checks(settings: Settings) -> Iterator[TranscriptCheck]:
    for id, model in settings.models.items():
        if model.source.startswith(REPLAY):
            path = Path(model.source.removeprefix(REPLAY))
            file = read_file(path)
            problems = file.problems or list(_problems_of_model(id, model, file))
            yield TranscriptCheck(id, path.name, len(file.entries), problems)


def _problems_of_model(id: str, model: ModelSettings, file: TranscriptFile) -> Iterator[str]:
    try:
        if model.family is None:
            raise SettingsError("a replay model needs a `family:` in models.yaml.")
        family_named(model.family)
        if any(each.entry.output_token_ids or each.entry.answer for each in file.entries):
            spec = ModelSpec(id, model.source, family=model.family)
            prepared = prepare(spec, lambda *progress: None, upcast=False)
            yield from _unwritable(prepared, Path(model.source).name, file)
    except ServerError as error:
        yield error.message


def _unwritable(prepared: PreparedModel, name: str, file: TranscriptFile) -> Iterator[str]:
    for placed in file.entries:
        try:
            placed.entry.tokens(prepared.checkpoint.tokenizer, prepared.family)
        except AnswerUnwritable as error:
            yield f"{name}:{placed.line}: entry {placed.number}: {error.message}"


Status = Literal["ok", "warn", "fail"]

PACKAGES = (
    *("mlx-local-server", "mlx", "mlx-lm", "llguidance", "openai-harmony", "tokenizers"),
    *("fastapi", "uvicorn", "mcp"),
)
PYTHONS = ((3, 11), (3, 15))
SCARCE_MEMORY = 2 << 30
SCARCE_DISK = 5 << 30
PROBE_SECONDS = 120

# It runs in a child process: the server never imports MLX, and the import can crash.
PROBE = """
import json
import mlx.core as mx
mx.eval(mx.ones(4) + 1)
info = mx.device_info()
print(json.dumps({
    "version": mx.__version__,
    "gpu": mx.default_device().type == mx.gpu,
    "name": info.get("device_name"),
    "working_set": info.get("max_recommended_working_set_size")
    or (int(0.9 * info["total_memory"]) if mx.cuda.is_available() else None),
}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    status: Status
    name: str
    found: str
    fix: str = ""


def examine(config: Path | None) -> Iterator[Check]:
    """Yields each check when it is done, since MLX takes a while to import."""
    yield _python()
    yield _versions()
    yield _platform()
    mlx, working_set = _mlx()
    yield mlx
    yield _memory(working_set)
    yield _descriptors(descriptors.within_reach())
    if sys.platform == "linux":
        yield _blas()
    yield from _folder("cache", cache_dir())
    yield from _settings(config, working_set)


def _python() -> Check:
    version = platform.python_version()
    oldest, newest = PYTHONS
    if oldest <= sys.version_info[:2] < newest:
        return Check("ok", "python", version)
    return Check("fail", "python", version, "use Python 3.11 to 3.14")


def _versions() -> Check:
    versions = {name: _version(name) for name in PACKAGES}
    text = ", ".join(f"{name} {number or 'is missing'}" for name, number in versions.items())
    if all(versions.values()):
        return Check("ok", "packages", text)
    return Check("fail", "packages", text, "install mlx-server again")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _platform() -> Check:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    match sys.platform, platform.machine():
        case "darwin", "arm64":
            return Check("ok", "platform", system)
        case "linux", "x86_64" | "aarch64":
            return Check("ok", "platform", system)
        case _:
            return Check("fail", "platform", system, "use a Mac with Apple silicon, or Linux")


def budget_here(chosen: int | None) -> MemoryBudget:
    """The memory budget that a server on this machine has. chosen: bytes from models.yaml."""
    asks_gpu = chosen is None and (sys.platform == "darwin" or _cuda_library() is not None)
    return memory_budget(chosen, _mlx()[1] if asks_gpu else None)


def _cuda_library() -> str | None:
    """The package that has MLX's library for NVIDIA GPUs, if it is installed."""
    return next((name for name in ("mlx-cuda-13", "mlx-cuda-12") if _version(name)), None)


def _mlx() -> tuple[Check, int | None]:
    """The check, and the GPU's recommended working set in bytes, if there is a GPU."""
    fix = "pip install --force-reinstall " + ("'mlx[cpu]'" if sys.platform == "linux" else "mlx")
    command = [sys.executable, "-c", PROBE]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        facts: dict[str, Any] = json.loads(run.stdout)
    except subprocess.TimeoutExpired:
        return Check("fail", "mlx", f"no answer within {PROBE_SECONDS} s", fix), None
    except ValueError:
        errors = run.stderr.strip().splitlines() or [f"ended with status {run.returncode}"]
        return Check("fail", "mlx", errors[-1], fix), None
    device = f"{facts['version']} on {facts['name']}, {'GPU' if facts['gpu'] else 'CPU'}"
    if sys.platform == "darwin" and not facts["gpu"]:
        return Check("warn", "mlx", device, "Metal is off: is this a virtual machine?"), None
    if (cuda := _cuda_library()) and not facts["gpu"]:
        # mlx[cpu] has a file of the same name, and the one that is installed last stays
        fix = f"pip install --force-reinstall --no-deps {cuda}, and look whether nvidia-smi works"
        return Check("warn", "mlx", f"{device}, though {cuda} is installed", fix), None
    return Check("ok", "mlx", device), facts["working_set"]


def _memory(working_set: int | None) -> Check:
    memory = psutil.virtual_memory()
    sizes = f"{size(memory.available)} of {size(memory.total)} free"
    if working_set:
        sizes += f"; recommended for the GPU: up to {size(working_set)}"
    if memory.available < SCARCE_MEMORY:
        return Check("warn", "memory", sizes, "close other programs, or serve only small models")
    return Check("ok", "memory", sizes)


def _descriptors(most: int) -> Check:
    if few := descriptors.warning(most):
        return Check("warn", "files", few, descriptors.FIX)
    clients = descriptors.connections(most)
    return Check("ok", "files", f"{most} can be open at once; {clients} of them are for clients")


def _blas() -> Check:
    if blas := fast_blas():
        return Check("ok", "blas", f"the engine preloads {blas}")
    debian = Path("/etc/debian_version").exists()
    fix = "apt install libblis4-pthread" if debian else "install BLIS or OpenBLAS"
    return Check("warn", "blas", "only MLX's own, which is slow", fix)


def _folder(name: str, folder: Path) -> Iterator[Check]:
    # access, unlike `exists`, raises no error for what may not be looked at
    existing = next(p for p in (folder, *folder.parents) if os.access(p, os.F_OK))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        fix = f"make it writable, or set MLX_SERVER_{name.upper()} to another folder"
        yield Check("fail", name, f"{existing} is not a writable folder", fix)
        return
    free = shutil.disk_usage(existing).free
    sizes = f"{folder}: {size(_size_on_disk(folder))} used, {size(free)} free on the disk"
    if free < SCARCE_DISK:
        yield Check("warn", name, sizes, f"free some disk space, or set MLX_SERVER_{name.upper()}")
    else:
        yield Check("ok", name, sizes)


def _size_on_disk(folder: Path) -> int:
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may have removed the file
                size += Path(path, name).lstat().st_size
    return size


def _settings(config: Path | None, working_set: int | None) -> Iterator[Check]:
    file = find_file(config)
    problems = check_file(file) if file else []
    for problem in problems:
        place = f"{file}:{problem.line}" if problem.line else f"{file}"
        yield Check("fail", "settings", f"{place}: {problem}")
    if problems:
        return
    try:
        settings = load_settings(config)
    except SettingsError as error:
        for line in error.message.splitlines():
            yield Check("fail", "settings", line)
    else:
        served = f"{file or 'no models.yaml, demo only'}: serves {', '.join(settings.models)}"
        yield Check("ok", "settings", served)
        yield from _changed_settings(settings.server)
        if folder := settings.store.data_dir:
            yield from _folder("data", folder)
        yield _wired(working_set)
        yield _budget(settings.server, working_set)
        yield _port(settings.server)
        yield from _models(settings)
        yield from _adapters(settings)
        yield from _transcripts(settings)
        yield from _connectors(settings)


def _changed_settings(server: ServerSettings) -> Iterator[Check]:
    """The settings that differ from their defaults; pydantic masks keys."""
    default = ServerSettings()
    changed = {name: v for name, v in values(server).items() if v != getattr(default, name)}
    changed = to_jsonable_python(changed)
    if changed:
        yield Check("ok", "server", ", ".join(f"{name}: {v}" for name, v in changed.items()))


def _wired(working_set: int | None) -> Check:
    if not working_set:
        return Check("ok", "wired", "not used: only Metal wires memory")
    least, most = (size(int(share * working_set)) for share in (WORTH_SHARE, MOST_SHARE))
    return Check("ok", "wired", f"weights that take {least} to {most} are kept resident")


def _budget(server: ServerSettings, working_set: int | None) -> Check:
    budget = memory_budget(server.memory_budget, working_set)
    source = f"{size(budget.nbytes)} for weights and caches: {budget.source}"
    if budget.warning:
        return Check("warn", "budget", source, budget.warning)
    return Check("ok", "budget", source)


def _port(server: ServerSettings) -> Check:
    try:
        for each in bound_sockets(server.host, server.port):
            each.close()
    except SettingsError as error:
        return Check("warn", "port", error.message)
    return Check("ok", "port", f"{server.host}:{server.port} is free")


def _models(settings: Settings) -> Iterator[Check]:
    """The models of which there is a folder, or should be one: others are yet to be fetched."""
    good = []
    for id, model in settings.models.items():
        folder = on_disk(model.source, model.revision) if model.has_weights else None
        if model.has_weights and os.path.isabs(model.source):
            folder = Path(model.source)
        if problem := problem_of(id, folder) if folder else "":
            yield Check("fail", "models", f"{id}: {problem}")
        elif folder:
            good.append(id)
    if good:
        yield Check("ok", "models", ", ".join(good))


def _adapters(settings: Settings) -> Iterator[Check]:
    from mlx_server.cli.adapters import rows_of  # it imports rich, which `serve` does not need

    rows = rows_of(settings)
    for row in rows:
        if not row.is_ok:
            yield Check("fail", "adapters", f"{row.name}: {row.wrong[0]}")
    if good := [row.name for row in rows if row.is_ok]:
        yield Check("ok", "adapters", ", ".join(good))


def _transcripts(settings: Settings) -> Iterator[Check]:
    good = []
    for check in transcript_checks(settings):
        for problem in check.problems:
            yield Check("fail", "replay", f"{check.model}: {problem}")
        if not check.problems:
            good.append(f"{check.model}: {check.file}, {check.entries} entries")
    if good:
        yield Check("ok", "replay", "; ".join(good))


def _connectors(settings: Settings) -> Iterator[Check]:
    for name, connector in settings.connectors.items():
        if connector.command and shutil.which(connector.command) is None:
            yield Check("warn", "connector", f"{name}: {NoProgram(connector.command)}")
