"""Real servers in processes of their own: started, watched and stopped."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, Any

import httpx
import httpx2
import psutil
import yaml
from openai import AsyncOpenAI, OpenAI

from tests.live.fork_server import ForkedProcess, can_fork, fork

if TYPE_CHECKING:
    from anthropic import Anthropic

START_SECONDS = 60.0
STOP_SECONDS = 15.0

DEMO, TINY, SHALLOW = "smollm2-135m", "tiny", "smollm2-shallow"
"""Of the common server: the demo model, which is real and dear, one with random weights and tokens
of a byte, and one that talks nonsense in the demo model's tokens."""
DEMO_MODEL = {"source": "demo:smollm2", "preload": True}
SAMPLES = Path(__file__).parents[2] / "adapters"
"""Adapters of the demo model."""

PLAIN: Any = {"trust_env": False, "verify": False}
"""For a client of loopback: each would take 15 ms to read the certificates of the world."""

Config = Mapping[str, Any]
ServerProcess = subprocess.Popen[str] | ForkedProcess


UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
"""Opens a WebSocket."""


@dataclass
class LiveServer:
    process: ServerProcess
    url: str
    log_file: Path
    printed: list[str] = field(default_factory=list)
    """Lines on its standard output after the one that names its address. They are read all the
    time, since a full pipe would make the server wait."""

    def __post_init__(self) -> None:
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(ValueError):  # it is closed with its server
            self.printed.extend(_stdout(self.process))

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        return self.log_file.read_text("utf-8")

    @property
    def engine(self) -> psutil.Process:
        (engine,) = filter(is_engine, children(self.process.pid))
        return engine

    def openai(self, **options: Any) -> OpenAI:
        http = httpx2.Client(**PLAIN, timeout=30)
        return OpenAI(**self._options(options), http_client=http)

    def openai_async(self, **options: Any) -> AsyncOpenAI:
        http = httpx2.AsyncClient(**PLAIN, timeout=30)
        return AsyncOpenAI(**self._options(options), http_client=http)

    def anthropic(self, **options: Any) -> "Anthropic":
        from anthropic import Anthropic  # it takes seconds to import, and few tests need it

        http = httpx2.Client(**PLAIN, timeout=30)
        return Anthropic(**self._anthropic_options(options), http_client=http)

    def http(self) -> httpx.Client:
        return httpx.Client(**PLAIN, base_url=self.url, timeout=30)

    def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **given}

    def _anthropic_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"base_url": self.url, "api_key": "none", "max_retries": 0, **given}

    def gauge(self, name: str) -> float:
        with self.http() as http:
            exposition = http.get("/metrics").text
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", exposition, re.MULTILINE)
        assert found, f"no {name} among the metrics"
        return float(found[1])

    def counted(self, name: str, model: str = "", **labels: str) -> float:
        """A counter with labels, which is there once it has counted; of one model, if any."""
        with self.http() as http:
            exposition = http.get("/metrics").text
        labels |= {"model": model} if model else {}
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", exposition, re.MULTILINE)
        return sum(float(count) for own, count in found if all(each in own for each in wanted))

    def is_healthy(self) -> bool:
        with self.http() as http:
            return http.get("/health").status_code == 200

    def idle(self) -> bool:
        gauges = ("mlx_server_batch_size", "mlx_server_queue")
        return all(self.gauge(name) == 0 for name in gauges)


def start(folder: Path, config: Config | None, *flags: str) -> LiveServer:
    folder.mkdir(parents=True, exist_ok=True)
    process, log_file = launch(folder, config, *flags)
    try:
        url = _listening(process, time.monotonic() + START_SECONDS)
    except BaseException:
        end(process)
        raise
    if url is None:
        end(process)
        raise AssertionError(f"the server did not start:\n{log_file.read_text('utf-8')}")
    return LiveServer(process, url, log_file)


def launch(folder: Path, config: Config | None, *flags: str) -> tuple[ServerProcess, Path]:
    """Without waiting for it to listen; `flags` come last and so win. None: no models.yaml."""
    models_yaml, log_file = folder / "models.yaml", folder / "server.log"
    arguments = ["serve"]
    if config is not None:
        models_yaml.write_text(yaml.safe_dump(dict(config)), "utf-8")
        arguments += ["--config", str(models_yaml)]
    arguments += ["--port", "0", *flags]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SERVER_")}
    environment["MLX_SERVER_DATA"] = str(folder / "data")
    if cache := os.environ.get("MLX_SERVER_CACHE"):
        environment["MLX_SERVER_CACHE"] = cache
    with log_file.open("wb") as log:
        if can_fork(sys.executable, environment):
            return fork(arguments, environment, folder, log.fileno()), log_file
        command = [sys.executable, "-m", "mlx_server", *arguments]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    return process, log_file


def _listening(process: ServerProcess, deadline: float) -> str | None:
    line = _line(_stdout(process), deadline)
    found = re.fullmatch(r"Listening on (http://\S+)\n", line)
    return found[1] if found else None


def _line(stream: IO[str], deadline: float) -> str:
    readable, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
    return stream.readline() if readable else ""


def _stdout(process: ServerProcess) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def stop(server: LiveServer) -> None:
    """As an init system does; a clean stop exits with 0 and leaves no process running."""
    left = children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(STOP_SECONDS)
    finally:
        end(server.process)
    assert code == 0, f"exit code {code}:\n{server.log}"
    assert_gone(left)


def end(process: ServerProcess) -> None:
    """Whatever state it is in."""
    for each in children(process.pid):
        with suppress(psutil.NoSuchProcess):  # some end by themselves meanwhile
            each.kill()
    process.kill()
    process.wait()
    _stdout(process).close()


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_engine(process: psutil.Process) -> bool:
    """Libraries start processes of their own for a moment, to learn what machine it is."""
    try:
        return "mlx_server.worker.process" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """A process that has ended counts as gone before its parent, or init, has read that it has."""
    eventually(lambda: not any(map(_runs, processes)), "they have ended", STOP_SECONDS)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def serving(folder: Path, config: Config | None = None, *flags: str) -> Iterator[LiveServer]:
    """A server for the length of the block; the block may end it itself."""
    server = start(folder, config, *flags)
    left = children(server.process.pid)
    try:
        yield server
        if server.process.poll() is None:
            stop(server)
        assert_gone(left)
    finally:
        end(server.process)


def eventually(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


class Watch:
    """Looks again and again while its block runs, which fails where a look does."""

    def __init__(self, look: Callable[[], object], pause: float = 0.0) -> None:
        self._look, self._pause = look, pause
        self._ended = Event()
        self._threads = ThreadPoolExecutor(1)
        self.looks = 0

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            self._look()
            self.looks += 1

    def __enter__(self) -> "Watch":
        self._watching = self._threads.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._threads.shutdown()
        self._watching.result()
