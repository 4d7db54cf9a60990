"""The contenders: each is a process of its own that is measured in turn with the others."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import httpx
import msgspec
import psutil
from conformance_parts import installed

from mlx_server.clients.bench import Result, Target, Workload, run, warm_up
from mlx_server.engine.engine_process import fast_blas
from mlx_server.sources.cache import cache_dir

START_SECONDS = 120.0
STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Contender:
    pid: int
    run: Callable[[Workload], Result]
    """Measures it when it is warm."""
    measure: Callable[[Workload], Result]
    """Measures it as it is."""

    def memory(self) -> int:
        """The resident bytes of all its processes together."""
        return sum(process.memory_info().rss for process in self._processes)

    def processor_seconds(self) -> float:
        """What all its processes together have used so far."""
        times = (process.cpu_times() for process in self._processes)
        return sum(used.user + used.system for used in times)

    @property
    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.pid)
        return [root, *root.children(recursive=True)]


Variables = Mapping[str, str]
"""Environment variables."""

Start = Callable[[Path], AbstractContextManager[Contender]]


@contextmanager
def _raw(kind: str, folder: Path) -> Iterator[Contender]:
    with child_process(["bench_parts.raw", kind, str(folder)], folder, fast()) as child:

        def measured(load: Workload) -> Result:
            assert child.stdin
            assert child.stdout
            child.stdin.write(msgspec.json.encode(load) + b"\n")
            child.stdin.flush()
            return msgspec.json.decode(child.stdout.readline(), type=Result)

        def warm(load: Workload) -> Result:
            measured(Workload(load.clients, load.clients, words=16, max_tokens=4))
            return measured(load)

        yield Contender(child.pid, warm, measured)


@contextmanager
def mlx_server(folder: Path, python: Path = Path(sys.executable)) -> Iterator[Contender]:
    """python: that of the checkout which is measured."""
    command = ["mlx_server", "serve", str(folder), "--log-level", "error"]
    with _served(command, folder.name, folder, {}, python) as contender:
        yield contender


@contextmanager
def _mlx_lm_server(folder: Path) -> Iterator[Contender]:
    command = ["mlx_lm.server", "--model", str(folder), "--log-level", "ERROR"]
    with _served(command, "default_model", folder, fast()) as contender:
        yield contender


@contextmanager
def _vllm_mlx(folder: Path) -> Iterator[Contender]:
    python = installed.vllm_mlx()
    command = ["vllm_mlx.cli", "serve", str(folder), "--continuous-batching"]
    with _served(command, str(folder), folder, fast(), python) as contender:
        yield contender


PEERS: dict[str, Start] = {"mlx_lm.server": _mlx_lm_server, "vllm-mlx": _vllm_mlx}

CONTENDERS: dict[str, Start] = {
    "raw-stream": partial(_raw, "stream"),
    "raw-batch": partial(_raw, "batch"),
    "mlx-server": mlx_server,
    "mlx_lm.server": _mlx_lm_server,
}


SAMPLES = Path(__file__).parents[2] / "adapters"


@contextmanager
def _with_adapters(folder: Path) -> Iterator[Target]:
    """Starts mlx-server with a configuration file, since `serve FOLDER` has no adapters."""
    with TemporaryDirectory() as own:
        config = Path(own) / "models.yaml"
        adapters = {
            name: {"path": str(SAMPLES / name), "allow_other_base": True}
            for name in ("pirate", "json-answer")
        }
        model = {"source": str(folder), "adapters": adapters}
        server = {"adapter_dirs": [str(SAMPLES)]}
        # YAML includes JSON
        config.write_bytes(msgspec.json.encode({"server": server, "models": {"demo": model}}))
        command = ["mlx_server", "serve", "--config", str(config), "--log-level", "error"]
        with answering(command, "demo", folder, {}) as (_, target):
            yield target


@contextmanager
def _mlx_lm_with_adapters(folder: Path) -> Iterator[Target]:
    """Starts mlx_lm.server, whose model is named by its path in each request: with its default
    model it ignores adapters."""
    command = ["mlx_lm.server", "--log-level", "ERROR"]
    with answering(command, str(folder), folder, fast()) as (_, target):
        yield target


LORA_SERVERS: dict[str, Callable[[Path], AbstractContextManager[Target]]] = {
    "mlx-server": _with_adapters,
    "mlx_lm.server": _mlx_lm_with_adapters,
}


@contextmanager
def _served(
    command: list[str],
    model: str,
    folder: Path,
    variables: Variables,
    python: Path = Path(sys.executable),
) -> Iterator[Contender]:
    with answering(command, model, folder, variables, python) as (pid, target):

        def measured(load: Workload) -> Result:
            return asyncio.run(run(target, load))

        def warm(load: Workload) -> Result:
            asyncio.run(warm_up(target, load))
            return measured(load)

        yield Contender(pid, warm, measured)


@contextmanager
def answering(
    command: list[str],
    model: str,
    folder: Path,
    variables: Variables,
    python: Path = Path(sys.executable),
) -> Iterator[tuple[int, Target]]:
    """python: the interpreter that has the command's module."""
    port = free_port()
    target = Target(f"http://127.0.0.1:{port}", model, api="completions")
    with child_process([*command, "--port", str(port)], folder, variables, python) as child:
        if not _answers(child, f"{target.url}/health"):
            raise RuntimeError(f"{command[0]} does not serve.")
        yield child.pid, target


@contextmanager
def child_process(
    module: list[str], folder: Path, variables: Variables, python: Path = Path(sys.executable)
) -> Iterator["subprocess.Popen[bytes]"]:
    command, pipe = [str(python), "-m", *module], subprocess.PIPE
    own = {name: value for name, value in os.environ.items() if not name.startswith("MLX_SERVER_")}
    # each checkout has a data folder of its own: one that is older may lock it for itself
    data = cache_dir() / "bench" / "data" / sha256(str(python).encode()).hexdigest()[:16]
    # without the caller's own paths, by which another checkout would run the modules of this one
    own["PYTHONPATH"] = str(Path(__file__).parents[1])
    environment = {**own, "HF_HUB_OFFLINE": "1", "MLX_SERVER_DATA": str(data), **variables}
    with (
        TemporaryFile() as log,
        # The process runs in the model's folder, where it finds no models.yaml.
        subprocess.Popen(
            command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=log
        ) as child,
    ):
        try:
            yield child
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
        finally:
            _stop(child)


def _stop(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()


def fast() -> Variables:
    """Returns the variables for a fast BLAS, which our engine chooses itself: the other contenders
    get the same one."""
    return {"LD_PRELOAD": blas} if (blas := fast_blas()) else {}


def _answers(child: "subprocess.Popen[bytes]", url: str) -> bool:
    deadline = time.monotonic() + START_SECONDS
    # One client without certificates: to read those takes longer than to ask.
    with httpx.Client(trust_env=False, verify=False) as http:  # noqa: S501  loopback
        while time.monotonic() < deadline and child.poll() is None:
            try:
                if http.get(url).is_success:
                    return True
            except httpx.TransportError:
                pass
            time.sleep(0.1)
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
