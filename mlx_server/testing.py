"""A kit for testing apps offline: a pytest plugin whose server answers what the test says.

sources/TESTING.md is its document. Importing it costs nearly nothing: what runs is imported by the
first test that uses it. `-p no:mlx_server.testing` turns the plugin off.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    import httpx2
    from openai import OpenAI


@dataclass(frozen=True)
class ScriptedAnswer:
    """One answer of a model: in words, as its raw output, or as token ids."""

    reasoning: str | None = None
    text: str | None = None
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Names of tools, with their arguments."""
    raw: str | None = None
    token_ids: tuple[int, ...] | None = None

    def __add__(self, other: "ScriptedAnswer") -> "ScriptedAnswer":
        """Joins the parts of two answers: a model thinks, then says, then calls."""
        if not isinstance(other, ScriptedAnswer):
            return NotImplemented
        for name in ("reasoning", "text"):
            if None not in (getattr(self, name), getattr(other, name)):
                raise ValueError(f"An answer can't have a {name} twice: join the two texts.")
        if any(each.raw is not None or each.token_ids is not None for each in (self, other)):
            raise ValueError("An answer in raw() or tokens() is whole: nothing can be added to it.")
        return replace(
            self,
            reasoning=other.reasoning if self.reasoning is None else self.reasoning,
            text=other.text if self.text is None else self.text,
            calls=(*self.calls, *other.calls),
        )

    def entry(self) -> dict[str, Any]:
        """The answer as an entry of a transcript."""
        if self.raw is not None:
            return {"output": self.raw}
        if self.token_ids is not None:
            return {"output_token_ids": self.token_ids}
        calls = [{"name": name, "arguments": arguments} for name, arguments in self.calls]
        return {
            "answer": {"reasoning": self.reasoning or "", "text": self.text or "", "calls": calls}
        }


def say(text: str) -> ScriptedAnswer:
    """The answer's text."""
    return ScriptedAnswer(text=text)


def think(text: str) -> ScriptedAnswer:
    """Reasoning; add what follows it: `think("Hm.") + say("Yes.")`."""
    return ScriptedAnswer(reasoning=text)


def call(name: str, /, **arguments: Any) -> ScriptedAnswer:
    """A call of a tool; add another: `call("f", a=1) + call("g")`."""
    return ScriptedAnswer(calls=((name, arguments),))


def raw(output: str) -> ScriptedAnswer:
    """An answer by the model's raw output, special tokens included, however wrong it is."""
    return ScriptedAnswer(raw=output)


def tokens(ids: Sequence[int]) -> ScriptedAnswer:
    """The same in token ids of the family's vocabulary."""
    return ScriptedAnswer(token_ids=tuple(ids))


KEY_VARIABLE = "MLX_REPLAY_KEY"
"""The environment variable with the key of the route by which tests give answers, which
`replay_server.py` reads."""

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
        command = [sys.executable, "-m", "mlx_server.replay_server", str(self._port)]
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
        from mlx_server.system.listening_sockets import announced_url

        assert self._process.stdout
        if url := announced_url(self._process.stdout):
            return int(url.rpartition(":")[2])
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
    from mlx_server.sources.cache import CACHE_VARIABLE, cache_dir

    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SERVER_")}
    cache = {k: v for k, v in os.environ.items() if k == CACHE_VARIABLE}
    if not sys.dont_write_bytecode:
        return {**kept, **cache}
    # nothing is written next to the modules, and to compile them takes as long as to import them
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**kept, **cache, "PYTHONPYCACHEPREFIX": str(cache_dir() / "bytecode")}


@dataclass(frozen=True)
class AskedRequest:
    path: str
    """The path of the request, such as `/v1/chat/completions`."""
    body: dict[str, Any]


class MlxReplay:
    """The server of the test run, during one test."""

    def __init__(self, server: "TestRunServer") -> None:
        self._server = server

    @property
    def url(self) -> str:
        """The server's address, as Anthropic's and Ollama's clients want it."""
        return self._server.url

    @property
    def base_url(self) -> str:
        """The same as OpenAI's clients want it; they take any API key."""
        return f"{self.url}/v1"

    @property
    def client(self) -> "OpenAI":
        """A client of the `openai` package, which must be installed."""
        return self._server.openai()

    def answers(
        self,
        family: str,
        answers: Iterable[ScriptedAnswer],
        *,
        model: str | None = None,
        delay_ms: float = 0,
    ) -> str:
        """Gives answers to the next requests, one to each, in turn, after those given before.

        family: how the model writes, such as `gpt_oss`. model: the name by which the app asks for
        it; by default the family's. delay_ms: the delay before each further token. Returns the
        model's name. Raises ValueError for an answer that the family can't write.
        """
        __tracebackhide__ = True  # pytest shows the test's line
        given = list(answers)
        for each in given:
            if not isinstance(each, ScriptedAnswer):
                raise TypeError(
                    f"{each!r} is not an answer. Write it as say(...), think(...), call(...), "
                    "raw(...) or tokens(...)."
                )
        body = {
            "family": family,
            "model": model,
            "answers": [{**each.entry(), "delay_ms": delay_ms} for each in given],
        }
        return str(self._server.door("POST", body)["model"])

    @property
    def requests(self) -> list[AskedRequest]:
        """The requests of this test to the server, in order."""
        found = self._server.door("GET")["requests"]
        return [AskedRequest(each["path"], _parsed(each["body"])) for each in found]

    def problems(self) -> list[str]:
        """The requests that had no answer, and the answers that no request used."""
        found = self._server.door("GET")
        unanswered = [f"There was no answer to {asked}." for asked in found["unanswered"]]
        unused = [
            f"{_count(count, 'answer')} of {name!r} {'was' if count == 1 else 'were'} not used."
            for name, count in found["left"].items()
        ]
        return [*unanswered, *unused]

    def check(self) -> None:
        """Fails unless every request had an answer and every answer was used, as the plugin does
        at the end of each test."""
        problems = self.problems()
        assert not problems, " ".join(problems)


def _parsed(body: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


FIXTURE = "mlx_replay"

SERVER = pytest.StashKey[tuple[TestRunServer, TemporaryDirectory[str]]]()
"""The server of this test run, and its folder."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the server if a test will need it, so that it is ready when that test begins."""
    needed = any(FIXTURE in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        _server(session.config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if found := session.config.stash.get(SERVER, None):
        server, folder = found
        server.stop()
        folder.cleanup()


@pytest.fixture
def mlx_replay(request: pytest.FixtureRequest) -> MlxReplay:
    """A server of OpenAI's API that answers what this test gives it: see mlx_server.testing."""
    server = _server(request.config)
    server.begin_test()
    return MlxReplay(server)


def _server(config: pytest.Config) -> TestRunServer:
    """The one server of this test run."""
    if SERVER not in config.stash:
        folder = TemporaryDirectory(prefix="mlx_replay-")
        config.stash[SERVER] = TestRunServer(Path(folder.name)), folder
    return config.stash[SERVER][0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that uses the fixture fails unless its requests and its answers match."""
    fixtures: dict[str, Any] = getattr(item, "funcargs", {})
    kit: MlxReplay | None = fixtures.get(FIXTURE)
    try:
        result = yield
    except Exception:
        if kit:
            _report(item, kit)
        raise
    if kit and (problems := kit.problems()):
        pytest.fail("\n".join(problems), pytrace=False)
    return result


def _report(item: pytest.Item, kit: MlxReplay) -> None:
    """Shows next to a failure what its cause may be."""
    try:
        problems = kit.problems()
    except ServerGone as error:
        problems = [str(error)]
    if problems:
        item.add_report_section("call", FIXTURE, "\n".join(problems))
