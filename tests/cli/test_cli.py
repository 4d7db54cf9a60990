"""The commands: their help, exit codes and output, and the chat against a server made of lines."""

import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlx_server import __version__
from mlx_server.cli import app, machine_checks, startup
from mlx_server.cli.engine_check import run_engine_check
from mlx_server.clients import chat as chatting
from mlx_server.clients.chat import Chat, client_of, connected, converse, own_server
from mlx_server.config.settings import ServerSettings, Settings
from mlx_server.engine import blas
from mlx_server.errors import BadRequest, GenerationFailed, ServerError, Unauthorized, Unavailable
from mlx_server.events import ReasoningDelta, TextDelta
from mlx_server.families.table import markdown
from mlx_server.system.listening_sockets import DEFAULT_URL
from tests.hostile.outbound import sitecustomize as outbound

pytestmark = pytest.mark.tables

ROOT = Path(__file__).parents[2]
MAC_PROBE = """
import json
print(json.dumps({"version": "1", "gpu": True, "name": "M", "working_set": 22906503168}))
"""
DONE = "data: [DONE]\n\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, with no settings around it."""
    for name in [name for name in os.environ if name.startswith("MLX_SERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_server", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


def delta(**fields: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': fields}]})}\n\n"


class Reply:
    """What the fake server answers to the next request."""

    def __init__(self, body: str, status: int = 200, length: int | None = None) -> None:
        self.body, self.status, self.length = body.encode(), status, length


class Fake(ThreadingHTTPServer):
    """Plays replies in order and then holds every stream open until its client leaves."""

    daemon_threads = True

    def __init__(self, *replies: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Wire)
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Wire(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._send(Reply(json.dumps({"data": [{"id": "first"}, {"id": "second"}]})))

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({**body, "key": self.headers["Authorization"]})
        if self.server.replies:
            self._send(self.server.replies.pop(0))
        else:
            self._send(Reply(delta(content="partial")))
            self.rfile.read(1)
            self.server.left.set()

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        if reply.length:
            self.send_header("Content-Length", str(reply.length))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, *_: object) -> None: ...


Serve = Callable[..., Fake]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Fake] = []

    def start(*replies: Reply) -> Fake:
        servers.append(Fake(*replies))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,)).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def nothing_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setattr(chatting, "DEFAULT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")


def talk(server: Fake, text: str = "hi") -> str:
    with client_of(server.url, None) as client:
        return "".join(piece.text for piece in Chat(client, "m").say(text))


@pytest.mark.parametrize("command", [[], ["serve"], ["chat"], ["doctor"]])
def test_help_teaches_by_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    examples = [line for line in result.output.splitlines() if line.startswith("  mlx-server ")]
    assert result.exit_code == 0
    assert 2 <= len(examples) <= 4
    assert "\b" not in result.output


def test_version() -> None:
    assert run("--version").stdout == f"mlx-server {__version__}\n"


def test_families_are_shown_without_a_server() -> None:
    shown = run("models", "--families", "--markdown")
    assert (shown.stdout, shown.returncode) == (markdown(), 0)
    assert "[TOOL_CALLS]…" in run("models", "--families").stdout


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from mlx_server.cli import app;"
        "assert CliRunner().invoke(app, ['serve', '--help']).exit_code == 0;"
        "print({'fastapi', 'httpx', 'mlx', 'yaml'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout == "set()\n"


def test_serve_runs_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    fake = ModuleType("mlx_server.app")
    fake.run = served.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx_server.app", fake)
    monkeypatch.setattr(startup, "check_named", lambda settings, named: None)  # no hub is asked
    flags = ["--port", "0", "--host", "::1", "--api-key", "a", "--api-key", "b"]
    flags += ["--concurrency", "3", "--log-level", "debug"]
    assert CliRunner().invoke(app, ["serve", "x/y", *flags]).exit_code == 0
    (settings,) = served
    server = settings.server
    assert list(settings.models) == ["x/y"]
    assert [key.get_secret_value() for key in server.api_keys] == ["a", "b"]
    assert (server.port, server.host, server.concurrency) == (0, "::1", 3)
    assert server.log_level == "debug"


def test_wrong_settings_exit_with_2() -> None:
    Path("bad.yaml").write_text("server:\n  prot: 1\n  queue: -1\n")
    result = run("serve", "--config", "bad.yaml", "--api-key", "sk-secret x")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "bad.yaml:2: server.prot: unknown key: did you mean `port`?",
        "bad.yaml:3: server.queue: should be greater than or equal to 0",
        "--api-key: a key should be one or more visible ASCII characters",
    ]
    assert result.stdout == ""
    assert run("serve", "--host", "0.0.0.0").returncode == 2
    assert run("serve", "--nonsense").returncode == 2


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        ("ModelUnusable('It is damaged. Fetch it again.')", 1, "It is damaged. Fetch it again.\n"),
        ("SettingsError('bad')", 2, "bad\n"),
        ("KeyboardInterrupt", 130, ""),
    ],
)
def test_exit_codes(error: str, code: int, stderr: str) -> None:
    program = (
        "import sys; from mlx_server.errors import *; from mlx_server import cli\n"
        f"@cli.app.command()\ndef boom() -> None: raise {error}\n"
        "sys.argv[1:] = ['boom']; cli.main()"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (out.returncode, out.stderr.strip(), out.stdout) == (code, stderr.strip(), "")


def test_doctor_is_content_with_a_good_file() -> None:
    Path("models.yaml").write_text("models: {a: {source: x/y}}\n")
    result = run("doctor")
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stdout
    names = {name for _, name, _ in lines}
    assert names >= {"python", "packages", "platform", "mlx", "memory", "cache", "settings"}
    assert names >= {"port", "engine", "demo"}
    assert ["ok", "settings", "models.yaml: serves a"] in lines
    assert "\x1b" not in result.stdout


def test_doctor_tells_a_bug_report_what_it_needs_and_no_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        Path("models.yaml").write_text(
            f"server: {{port: {port}, api_keys: [a-key], queue: 3}}\n"
            "models: {a: {source: x/y}}\n"
        )
        result = run("doctor", "--json")
    assert result.returncode == 0, result.stdout
    found = {check["name"]: check for check in json.loads(result.stdout)}
    for package in ("mlx", "mlx-lm", "llguidance"):
        assert f"{package} {version(package)}" in found["packages"]["found"]
    assert "queue: 3" in found["server"]["found"]
    assert "a-key" not in result.stdout
    assert (found["port"]["status"], "--port" in found["port"]["fix"]) == ("warn", True)
    assert found["engine"]["found"].startswith("starts in ")


def test_doctor_tells_of_an_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (check,) = run_engine_check()
    assert (check.status, check.name) == ("fail", "engine")
    assert check.found == "FileNotFoundError: No such file or directory: 'python'"


def test_doctor_tells_every_problem_on_a_line_of_its_own() -> None:
    Path("bad.yaml").write_text(f"models:\n  a: {{source: {'x' * 300}, aliases: [a]}}\n  b: 1\n")
    result = run("doctor", "--config", "bad.yaml")
    assert result.returncode == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("fail")] == [
        "fail settings  bad.yaml:2: models.a.aliases[0]: the name is taken by `models.a`",
        "fail settings  bad.yaml:3: models.b: should be a mapping",
    ]


@pytest.mark.parametrize(
    ("wired", "says"),
    [
        ("auto", "auto: weights that take 10.0 GiB to 18.0 GiB are kept resident"),
        ("never", "never"),
        (4 << 30, "up to 4.0 GiB of weights"),
        (40 << 30, "up to 18.0 GiB of weights"),
    ],
)
def test_doctor_tells_what_is_wired(wired: Any, says: str) -> None:
    check = machine_checks._wired(ServerSettings(wired=wired), 20 << 30)
    assert says in check.found
    assert "only Metal" in machine_checks._wired(ServerSettings(wired=wired), None).found


def test_doctor_sees_what_only_flags_and_environment_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_HOST", "0.0.0.0")
    (check,) = [check for check in machine_checks.examine(None) if check.name == "settings"]
    assert check.status == "fail"
    assert "allow_insecure" in check.found


def test_doctor_says_what_the_budget_is_and_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_checks, "PROBE", MAC_PROBE)

    def found() -> machine_checks.Check:
        (check,) = [check for check in machine_checks.examine(None) if check.name == "budget"]
        return check

    assert (found().status, found().fix) == ("ok", "")
    assert found().found == (
        "21.5 GB for weights and caches: Metal's recommended working set (22.9 GB) minus "
        "1.4 GB to compute in; change it with `memory_budget` in models.yaml"
    )
    Path("models.yaml").write_text("server: {memory_budget: 24GB}\nmodels: {m: {source: a/b}}")
    assert found().status == "warn"
    assert "24.0 GB is more than the 22.9 GB that Metal recommends" in found().fix


def test_doctor_does_not_import_mlx() -> None:
    program = "import sys; from mlx_server.cli.machine_checks import examine; list(examine(None));"
    program += "print('mlx.core' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout == "False\n"


@pytest.mark.parametrize(
    ("probe", "found"),
    [
        ("raise ImportError('no mlx here')", "ImportError: no mlx here"),
        ("import os; os.abort()", "ended with status -6"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_doctor_survives_a_broken_mlx(
    probe: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "PROBE", probe)
    monkeypatch.setattr(machine_checks, "PROBE_SECONDS", 0.5 if "sleep" in probe else 60)
    (check,) = [check for check in machine_checks.examine(None) if check.name == "mlx"]
    assert (check.status, check.found) == ("fail", found)
    assert check.fix.startswith("pip install")


def test_doctor_wants_a_cache_it_can_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch(0o777)
    monkeypatch.setenv("MLX_SERVER_CACHE", str(folder / "file" / "cache"))
    (check,) = [check for check in machine_checks.examine(None) if check.name == "cache"]
    assert check.status == "fail"
    assert check.found == f"{folder / 'file'} is not a writable folder"


def test_doctor_draws_a_table_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    checks = [
        machine_checks.Check("ok", "a", "[b]x"),
        machine_checks.Check("warn", "c", "d", "fix it"),
    ]
    assert machine_checks.report(checks, console)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert "│" in drawn
    assert "[b]x" in drawn
    assert not machine_checks.report([*checks, machine_checks.Check("fail", "e", "f")], console)


def test_fast_blas_takes_the_first_that_has_cblas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "LIBRARIES", ("libnot-here.so.4", "libc.so.6"))
    assert blas.fast_blas() is None
    monkeypatch.setattr(blas, "_has_cblas", lambda library: True)
    assert blas.fast_blas() == "libnot-here.so.4"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.fast_blas() is None


def test_doctor_names_the_fix_for_a_slow_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "fast_blas", lambda: None)
    assert machine_checks._blas().status == "warn"
    monkeypatch.setattr(machine_checks, "fast_blas", lambda: "libblis.so.4")
    assert machine_checks._blas() == machine_checks.Check(
        "ok", "blas", "the engine preloads libblis.so.4"
    )


def test_chat_remembers_and_forgets(serve: Serve) -> None:
    server = serve(*[Reply(delta(content=text) + DONE) for text in ("one", "two", "three")])
    lines = iter(["hi", "again", "/reset", "", "anew", "/exit", "never read"])
    said: list[str] = []
    with client_of(server.url, "k") as client:
        chat = Chat(client, "m", "Be brief.", {"temperature": 0.0})
        converse(chat, lambda: next(lines), lambda piece: said.append(piece.text), said.append)
    system = {"role": "system", "content": "Be brief."}
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one"}]
    assert [request["messages"] for request in server.requests] == [
        [system, {"role": "user", "content": "hi"}],
        [system, *turn, {"role": "user", "content": "again"}],
        [system, {"role": "user", "content": "anew"}],
    ]
    fields = {"model": "m", "stream": True, "temperature": 0.0, "key": "Bearer k"}
    assert server.requests[0].items() >= fields.items()
    assert next(lines) == "never read"


def test_text_and_reasoning_are_told_apart(serve: Serve) -> None:
    stream = ": keep-alive\n\n" + delta(role="assistant", content="")
    stream += delta(reasoning_content="hm", reasoning="hm") + delta(content="yes") + DONE
    server = serve(Reply(stream), Reply(stream))
    with client_of(server.url, None) as client:
        assert list(Chat(client, "m").say("?")) == [ReasoningDelta(0, "hm"), TextDelta(0, "yes")]
    assert run("chat", "--url", server.url, stdin="?").stdout == "yes\n"


OPENAI_ERROR = json.dumps({"error": {"message": "The queue is full.", "code": "overloaded"}})


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (Reply(OPENAI_ERROR, 503), BadRequest, r"The queue is full\. \(HTTP 503\)"),
        (Reply(OPENAI_ERROR, 401), Unauthorized, "--api-key"),
        (Reply("<html>", 502), BadRequest, r"not OpenAI-compatible.*\(HTTP 502\)"),
        (Reply("[1]", 400), BadRequest, "not OpenAI-compatible"),
        (Reply(delta(content="a") + f"data: {OPENAI_ERROR}\n\n{DONE}"), GenerationFailed, "full"),
        (Reply(delta(content="a")), GenerationFailed, "ended before the answer did"),
        (Reply(delta(content="a"), length=999), GenerationFailed, "connection .* failed"),
        (Reply("data: {oops\n\n"), GenerationFailed, "not in the format"),
        (Reply("data: 5\n\n"), GenerationFailed, "not in the format"),
    ],
)
def test_a_failed_answer_is_told_and_forgotten(
    reply: Reply, error: type[ServerError], message: str, serve: Serve
) -> None:
    server = serve(reply)
    with client_of(server.url, None) as client:
        chat = Chat(client, "m")
        with pytest.raises(error, match=message):
            list(chat.say("hi"))
        assert chat.turns == []


def test_an_error_does_not_end_the_chat(serve: Serve) -> None:
    server = serve(Reply(OPENAI_ERROR, 503), Reply(delta(content="fine") + DONE))
    lines, notes = iter(["hi", "hi", "/what", "/exit"]), list[str]()
    with client_of(server.url, None) as client:
        converse(Chat(client, "m"), lambda: next(lines), lambda _: None, notes.append)
    assert "The queue is full." in notes[0]
    assert notes[2].startswith("Unknown command")
    assert [request["messages"] for request in server.requests] == [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "hi"}],
    ]


def test_closing_an_answer_closes_the_stream(serve: Serve) -> None:
    server = serve()
    with client_of(server.url, None) as client:
        chat = Chat(client, "m")
        with closing(chat.say("hi")) as answer:
            assert next(answer) == TextDelta(0, "partial")
        assert server.left.wait(10)
        assert [turn["content"] for turn in chat.turns] == ["hi", "partial"]


def test_piped_chat_prints_the_answer_only(serve: Serve) -> None:
    server = serve(Reply(delta(content="Hel") + delta(content="lo \ud83d") + DONE))
    result = run("chat", "--url", server.url + "/v1/", stdin="hi\n")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello ?\n", "")
    assert server.requests[0]["model"] == "first"


def test_piped_chat_fails_with_1(serve: Serve) -> None:
    cut = run("chat", "m", "--url", serve(Reply(delta(content="Hel"))).url, stdin="hi")
    assert (cut.returncode, cut.stdout) == (1, "Hel")
    assert "ended before the answer did" in cut.stderr
    empty = run("chat", stdin=" \n")
    assert (empty.returncode, empty.stdout) == (1, "")
    assert "no question" in empty.stderr
    assert "Traceback" not in cut.stderr + empty.stderr


def test_an_unusable_url_or_key(nothing_at_home: None) -> None:
    silent = DEFAULT_URL.replace("127.0.0.1", "127.0.0.2")
    with pytest.raises(Unavailable, match="mlx-server serve"), connected(silent, None, None):
        pass
    for url in ("no-scheme", "http://[", "ftp://x"):
        with outbound.allowed(), pytest.raises(ServerError), connected(url, None, None):
            pass
    with pytest.raises(BadRequest) as error:
        client_of("http://127.0.0.1", "sk-secret\n")
    assert "sk-secret" not in str(error.value)


def test_ctrl_c_stops_the_answer_and_not_the_chat(serve: Serve) -> None:
    server = serve()
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "mlx_server", "chat", "m", "--url", server.url]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside) as child:
        os.close(inside)
        expect(terminal, b"> ")
        os.write(terminal, b"hi\n")
        expect(terminal, b"partial")
        child.send_signal(signal.SIGINT)
        expect(terminal, b"Stopped.")
        assert server.left.wait(10)
        expect(terminal, b"> ")
        os.write(terminal, b"/exit\n")
        assert child.wait(10) == 0
    os.close(terminal)


def expect(terminal: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], 20)
        assert ready, f"{wanted!r} did not come, but {seen!r}"
        seen += os.read(terminal, 1)


OWN = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Wire(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        key = os.environ["MLX_SERVER_API_KEYS"]
        right = self.headers["Authorization"] == f"Bearer {key}"
        self.send_response(200 if right else 401)
        self.end_headers()
        text = " ".join(sys.argv[1:])
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "%s"}}]}\\n\\n' % text.encode())
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *_): pass

server = HTTPServer(("127.0.0.1", 0), Wire)
print("Loading", flush=True)
print(f"Listening on http://127.0.0.1:{server.server_port}", flush=True)
print("x" * 200_000, flush=True)
server.serve_forever()
"""


def test_without_a_server_the_chat_starts_its_own(
    nothing_at_home: None, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "not-for-this-one")
    monkeypatch.setattr(chatting, "SERVE", [sys.executable, "-c", OWN])
    Path("models.yaml").write_text("models: {a: {source: x/y, aliases: [b]}}\n")
    wanted = [(None, "a", ""), ("b", "b", ""), ("org/name", "org/name", "org/name")]
    wanted += [("./c", "c", "./c")]
    for model, expected, arguments in wanted:
        with connected(None, None, model) as (client, model_id):
            assert model_id == expected
            assert "".join(d.text for d in Chat(client, model_id).say("hi")) == arguments
        with pytest.raises(Unavailable), client_of(str(client.base_url), None) as after:
            chatting.served_models(after)


def test_an_own_server_that_does_not_start() -> None:
    with pytest.raises(Unavailable, match="did not start"), own_server(["true"]):
        pass


def test_ctrl_c_in_the_terminal_does_not_reach_an_own_server() -> None:
    program = "import os, signal; print(f'Listening on http://{os.getpgid(0)}', flush=True);"
    with own_server([sys.executable, "-c", program + "signal.pause()"]) as (url, _):
        assert url != f"http://{os.getpgid(0)}"


def test_an_own_server_ends_with_a_killed_chat(folder: Path) -> None:
    program = (
        "import sys; from mlx_server.clients.chat import own_server\n"
        f"with own_server([sys.executable, '-c', {OWN!r}]) as (url, key):\n"
        "    print(url, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout
        assert child.stdin
        url = child.stdout.readline().strip()
        # A terminal that closes brings both. The end of its input also wakes a read that began
        # just after the signal came, and which the signal could not interrupt any more.
        child.send_signal(signal.SIGHUP)
        child.stdin.close()
        assert child.wait(10) == 128 + signal.SIGHUP
    with pytest.raises(Unavailable), client_of(url, None) as client:
        chatting.served_models(client)
