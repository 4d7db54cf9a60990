"""The attacked servers, and how those are started that belong to this script."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from bench_parts.contenders import START_SECONDS, fast

ANSWER_SECONDS = 10.0


class Server:
    """A server that runs already; this script can't restart it."""

    def __init__(self, name: str, url: str, model: str) -> None:
        self.name, self.url, self.model = name, url.removesuffix("/v1").rstrip("/"), model

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def has_died(self) -> bool:
        try:
            with self.http() as http:
                http.get("/v1/models")
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            pass
        return False

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=ANSWER_SECONDS)


class Started(Server):
    """A server that this script starts, as a process with a model of its own; its log is not
    kept."""

    def __init__(self, name: str, command: Sequence[str], model: str, folder: Path) -> None:
        self._command, self._folder, self._port = command, folder, _free_port()
        super().__init__(name, f"http://127.0.0.1:{self._port}", model)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def start(self) -> None:
        command = [sys.executable, "-m", *self._command, "--port", str(self._port)]
        own = {name: at for name, at in os.environ.items() if not name.startswith("MLX_SERVER_")}
        self._process = subprocess.Popen(
            command,
            cwd=self._folder,  # a folder without models.yaml
            env={**own, **fast(), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._await()

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(ANSWER_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def has_died(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _await(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not self.has_died():
            try:
                with self.http() as http:
                    if http.get("/health").is_success:
                        return
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError(f"{self.name} does not serve.")


def ours(folder: Path) -> Server:
    command = ("mlx_server", "serve", str(folder), "--log-level", "error")
    return Started("mlx-server", command, folder.name, folder)


def mlx_lms(folder: Path) -> Server:
    command = ("mlx_lm.server", "--model", str(folder), "--log-level", "ERROR")
    return Started("mlx_lm.server", command, "default_model", folder)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
