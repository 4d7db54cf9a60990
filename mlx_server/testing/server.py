"""The server of a test run: a process of its own, started once, on a free port of loopback."""

import json
import os
import re
import secrets
import subprocess
import sys
from collections import deque
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Literal

from mlx_server.sources.cache import CACHE_VARIABLE, cache_dir

if TYPE_CHECKING:
    import httpx2
    from openai import OpenAI

KEY_VARIABLE = "MLX_REPLAY_KEY"
"""The environment variable with the key of the route by which tests give answers."""

GIVEN = "/v1/replay/given"
STOP_SECONDS = 10.0
DOOR_SECONDS = 60.0
"""The first answer of a family waits for its vocabulary."""
LOG_LINES = 12
"""The number of lines of the server's log that an error shows."""


class ServerGone(Exception):
    """The server of the test run has ended, or was not able to start."""


class TestRunServer:
    __test__ = False  # pytest would take it for a class of tests

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = secrets.token_urlsafe()
        self._openai: OpenAI | None = None
        self._client: httpx2.Client | None = None
        self._port = 0
        self._begin()

    @property
    def url(self) -> str:
        """Waits until the server listens there."""
        self._http()
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin_test(self) -> None:
        """Forgets the test before; starts the server again if that test ended it."""
        if self._process.poll() is not None:
            self._end()
            self._begin()
        self.door("DELETE")

    def door(self, method: Literal["GET", "POST", "DELETE"], body: Any = None) -> Any:
        """Sends a request to the server's route for tests. Raises ServerGone, and ValueError for a
        request that the server refuses."""
        __tracebackhide__ = True
        import httpx2  # while the process starts

        try:
            # in UTF-8, which has no half of a surrogate pair: the server would replace its escape
            content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
            response = self._http().request(method, GIVEN, content=content)
        except httpx2.HTTPError as error:
            raise ServerGone(self._why(f"does not answer: {error!r}")) from None
        found = response.json()
        if response.status_code == httpx2.codes.BAD_REQUEST:
            raise ValueError(found["error"]["message"])
        if not response.is_success:
            raise ServerGone(self._why(f"failed: {found['error']['message']}"))
        return found

    def openai(self) -> "OpenAI":
        if self._openai is None:
            from openai import DefaultHttpxClient, OpenAI

            self._openai = OpenAI(
                base_url=f"{self.url}/v1",
                api_key="none",
                max_retries=0,
                # a proxy of the environment has no way to this machine
                http_client=DefaultHttpxClient(trust_env=False),
            )
        return self._openai

    def stop(self) -> None:
        if self._openai:
            self._openai.close()
        self._end()

    def _begin(self) -> None:
        """Starts the process, which begins to listen while the test run goes on."""
        # the same port after a restart, since apps remember the address
        command = [sys.executable, "-m", "mlx_server.testing.process", str(self._port)]
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env={**_environment(), KEY_VARIABLE: self._key},
                stdin=subprocess.PIPE,  # at its end the server ends, also if pytest was killed
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C ends the tests, and they end the server
            )

    def _http(self) -> "httpx2.Client":
        import httpx2

        if self._client is None:
            self._port = self._listening()
            self._client = httpx2.Client(
                base_url=f"http://127.0.0.1:{self._port}",
                headers={
                    "Authorization": f"Bearer {self._key}",
                    "Content-Type": "application/json",
                },
                timeout=DOOR_SECONDS,
                trust_env=False,
                verify=False,  # no TLS on loopback; certificates take 15 ms to read
            )
        return self._client

    def _listening(self) -> int:
        output = self._process.stdout
        assert output
        for line in output:
            if found := re.match(r"Listening on http://127\.0\.0\.1:(\d+)", line):
                Thread(target=_drain, args=(output,), daemon=True).start()
                return int(found[1])
        output.close()
        self._close()
        raise ServerGone(self._why("did not start"))

    def _end(self) -> None:
        client, self._client = self._client, None
        if client:
            client.close()
        elif self._process.stdout:
            self._process.stdout.close()
        self._process.terminate()
        self._close()

    def _close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _log_file(self) -> Path:
        return self._folder / "server.log"

    def _why(self, what: str) -> str:
        code = self._process.poll()
        ended = "" if code is None else f" It has ended with the exit code {code}."
        lines = self._log_file.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"The server of mlx_replay {what}.{ended} Its log ends with:", *lines])


def _environment() -> dict[str, str]:
    """The environment of the server."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SERVER_")}
    cache = {k: v for k, v in os.environ.items() if k == CACHE_VARIABLE}
    if not sys.dont_write_bytecode:
        return {**kept, **cache}
    # nothing is written next to the modules, and to compile them takes as long as to import them
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**kept, **cache, "PYTHONPYCACHEPREFIX": str(cache_dir() / "bytecode")}


def _drain(output: IO[str]) -> None:
    with output:
        deque(output, maxlen=0)
