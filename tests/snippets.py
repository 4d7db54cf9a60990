"""The snippets of documents, and the ways in which they are run."""

import gc
import hashlib
import io
import json
import lzma
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml

from mlx_server.cli import app
from mlx_server.clients.providers import LLMProvider, load_providers
from mlx_server.config.hostfile import load_hostfile
from mlx_server.config.models_yaml import load_settings
from mlx_server.families.base import ModelFamily
from mlx_server.families.table import rows
from mlx_server.messages import Conversation, Message
from mlx_server.sources.transcript import read_transcript
from tests.families import byte_level, checkpoint
from tests.hostile.corpus.attack import case
from tests.live.server import LiveServer, serving

ROOT = Path(__file__).parents[1]

URL = "http://127.0.0.1:8000"
"""What snippets name; a test puts in the server that it started."""


@dataclass(frozen=True)
class Block:
    document: str
    heading: str
    line: int
    language: str
    code: str


FENCE, HEADING = re.compile(r"( *)```(\w*)$"), re.compile(r"#+ (.*)")


def blocks(path: Path) -> Iterator[Block]:
    heading, indent, language, code = "", "", "", list[str]()
    first = 0
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        fence = FENCE.fullmatch(line)
        if first and fence:
            document = path.relative_to(ROOT).as_posix()
            yield Block(document, heading, first, language, "\n".join(code) + "\n")
            first = 0
        elif first:
            code.append(line.removeprefix(indent))
        elif fence:
            indent, language, first, code = fence[1], fence[2], number, []
        elif found := HEADING.fullmatch(line):
            heading = found[1]


@dataclass(frozen=True)
class Snippet:
    """A block on its way through a test, the block that follows it, and where it runs."""

    block: Block
    following: Block | None
    folder: Path
    request: pytest.FixtureRequest

    @property
    def shown(self) -> str:
        assert self.following
        return self.following.code

    @property
    def server(self) -> LiveServer:
        server: LiveServer = self.request.getfixturevalue("server")
        return server

    @property
    def code(self) -> str:
        """It names the server of the test."""
        code = self.block.code
        return code.replace(URL, self.server.url) if URL in code else code


Run = Callable[[Snippet], None]


@dataclass(frozen=True)
class NotHere:
    reason: str


def is_shown(snippet: Snippet) -> None:
    """The block before this one prints it, and its own test compares the two."""


def output(command: list[str], folder: Path) -> str:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, ""), f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def printed(code: str) -> str:
    """In this process: to import a client takes longer than to use it."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of clients that only the exit closes
        exec(compile(code, "<snippet>", "exec", dont_inherit=True), {"__name__": "__main__"})
        gc.collect()
    assert err.getvalue() == "", out.getvalue()
    return out.getvalue()


def python(snippet: Snippet) -> None:
    """It prints the next block, in any order of lines."""
    lines = printed(snippet.code).splitlines()
    assert sorted(lines) == sorted(snippet.shown.splitlines())


def python_printing(*expected: str) -> Run:
    def run(snippet: Snippet) -> None:
        out = printed(snippet.code)
        assert [text for text in expected if text not in out] == [], out

    return run


def curl(snippet: Snippet) -> str:
    if not shutil.which("curl"):
        pytest.skip("there is no curl")
    code = snippet.code.replace("curl ", "curl -sS --noproxy '*' ")
    return output(["sh", "-c", code], snippet.folder)


def names_paris(snippet: Snippet) -> None:
    assert "Paris" in json.loads(curl(snippet))["choices"][0]["message"]["content"]


def fills_in(snippet: Snippet) -> None:
    assert json.loads(curl(snippet))["choices"][0]["text"] == "return a + b"


def generates(snippet: Snippet) -> None:
    """The next block is its answer, but for the id of the call and the counts of tokens."""
    answer, shown = json.loads(curl(snippet)), json.loads(snippet.shown)
    assert shown.pop("usage").keys() <= answer.pop("usage").keys()
    for body in (answer, shown):
        body["tool_calls"][0]["id"] = ""
    assert answer == shown


def chats(snippet: Snippet) -> None:
    """It prints the next block."""
    assert snippet.block.code.count("mlx-server chat ") == 1
    chat = f"{shlex.quote(sys.executable)} -m mlx_server chat --url {snippet.server.url} "
    code = snippet.block.code.replace("mlx-server chat ", chat)
    assert output(["sh", "-c", code], snippet.folder) == snippet.shown


def outlives(snippet: Snippet) -> None:
    """The engine is killed when the stream has begun, and the stream ends as it would have."""
    code = snippet.code.replace("curl ", "curl -sS --noproxy '*' ")
    with subprocess.Popen(["sh", "-c", code], stdout=subprocess.PIPE, text=True) as stream:
        assert stream.stdout
        first = stream.stdout.readline()
        snippet.server.engine.kill()
        rest = stream.stdout.read()
    assert first.startswith("data: {")
    assert rest.rstrip().endswith("data: [DONE]")
    assert '"error"' not in rest


def kills_engine(snippet: Snippet) -> None:
    """The pattern is found in the command line of the engine, and not in the server's."""
    pattern = shlex.split(snippet.block.code)[-1]
    processes = snippet.server.engine, psutil.Process(snippet.server.process.pid)
    assert [pattern in " ".join(each.cmdline()) for each in processes] == [True, False]


def shows_metrics(snippet: Snippet) -> None:
    names = {line.partition(" ")[0].partition("{")[0] for line in curl(snippet).splitlines()}
    assert names == {f"mlx_server_{kind}_bytes" for kind in ("active", "buffer", "peak")}


def commands(snippet: Snippet) -> None:
    """They take long or change this machine, so only their options are parsed."""
    code = re.sub(r"\s#.*", "", snippet.block.code.replace("\\\n", " "))
    for line in re.split(r"&&|\n", code.strip()):
        name, *arguments = shlex.split(line)
        command = name.removeprefix(".venv/bin/")
        if command in ("mlx-server", "scripts/serve"):
            parse([*(["serve"] if command == "scripts/serve" else []), *arguments])
        elif command != "sleep":
            text = subprocess.check_output([ROOT / command, "--help"], text=True)
            words = [word for word in arguments if not word.isupper()]
            assert [word for word in words if word not in text] == []


def parse(arguments: list[str]) -> None:
    """As the command line does, without running the command."""
    command: Any = typer.main.get_command(app)
    rest = arguments
    while hasattr(command, "get_command"):
        command, rest = command.get_command(None, rest[0]), rest[1:]
    if "--help" not in rest:
        command.make_context("mlx-server", list(rest))


def settings(snippet: Snippet) -> None:
    file = snippet.folder / "models.yaml"
    file.write_text(snippet.block.code)
    (snippet.folder / "answers.yaml").write_text("- output: Yes.")
    for folder in ("lora/support", "lora/mine"):
        (snippet.folder / folder).mkdir(parents=True)
    loaded = load_settings(file)
    for section, entries in yaml.safe_load(snippet.block.code).items():
        assert list(getattr(loaded, section)) == list(entries)


def hostfile(snippet: Snippet) -> None:
    assert len(load_hostfile(written_hostfile(snippet)).hosts) == 2


def written_hostfile(snippet: Snippet) -> Path:
    found = blocks(ROOT / snippet.block.document)
    (shown,) = (block.code for block in found if block.language == "json")
    file = snippet.folder / "hosts.json"
    file.write_text(shown)
    return file


def split_settings(snippet: Snippet) -> None:
    """They read the document's hostfile."""
    written_hostfile(snippet)
    settings(snippet)
    big, small = load_settings(snippet.folder / "models.yaml").models.values()
    assert big.distributed
    assert not small.distributed


def elsewhere(snippet: Snippet) -> None:
    """The test's server is the other one, and a second server asks it."""
    code = snippet.block.code.replace("http://127.0.0.1:8001", snippet.server.url)
    (name,) = (config := yaml.safe_load(code))["models"]
    with serving(snippet.folder / "gateway", config) as gateway, gateway.openai() as client:
        ask: Any = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model=name, messages=ask, temperature=0)
        assert "Paris" in (answer.choices[0].message.content or "")


def transcript(snippet: Snippet) -> None:
    """The server's model `fake` plays it."""
    matching, other = yaml.safe_load(snippet.block.code)
    with snippet.server.openai() as client:
        for text, entry in ((matching["match"], matching), ("Why?", other)):
            messages: Any = [{"role": "user", "content": text}]
            answer = client.chat.completions.create(model="fake", messages=messages)
            assert answer.choices[0].message.content == entry["output"]


def agents_loop(snippet: Snippet) -> None:
    """A transcript whose first two entries are the steps of one loop."""
    file = snippet.folder / "answers.yaml"
    file.write_text(snippet.block.code)
    found = read_transcript(file, 1)
    user, call = Message("user", "What is 1 + 1?"), Message("assistant")
    results = [(), (call, Message("tool", "2")), (call, Message("tool", "error: none"))]
    picked = [found.pick(Conversation((user, *later))).name for later in results]
    assert [name.partition(" of ")[0] for name in picked] == ["entry 1", "entry 2", "entry 3"]


def fixture(snippet: Snippet) -> None:
    """A test that uses it passes."""
    file = snippet.folder / "test_app.py"
    file.write_text(f"{snippet.code}\n\ndef test_app() -> None:\n    pass\n")
    output([sys.executable, "-m", "pytest", "-q", str(file)], snippet.folder)


def app_tests(snippet: Snippet) -> None:
    """Its tests pass."""
    ran: str = snippet.request.getfixturevalue("ran_app_tests")
    name = f"{app_test_name(snippet.block)}.py"
    assert re.search(rf"^{name}::\w+ PASSED", ran, re.MULTILINE), ran
    assert not re.search(rf"^{name}::\w+ (?!PASSED)", ran, re.MULTILINE), ran


def app_test_name(block: Block) -> str:
    return "test_" + re.sub(r"\W", "_", f"{block.document}_{block.line}")


def family(snippet: Snippet) -> None:
    """A checkpoint of each of its types belongs to it, and its calls are found."""
    names: dict[str, Any] = {}
    exec(snippet.block.code, names)
    found: ModelFamily = names["EXAMPLE"]
    like = checkpoint(snippet.folder, byte_level(), "{{ messages }}")
    kinds = [replace(like, model_type=type) for type in found.model_types]
    assert [found.evidence(kind) for kind in kinds] == [1, 1]
    assert rows([found])[0][3:] == (["<think>…</think>"], ["<tool_call>…</tool_call>"])


def attack(snippet: Snippet) -> None:
    """The corpus has it, word for word."""
    assert eval(f"{{{snippet.block.code}}}", {"case": case})
    corpus = (ROOT / snippet.block.document).parent.glob("*.py")
    assert any(snippet.block.code.strip() in path.read_text() for path in corpus)


def conversation(snippet: Snippet) -> None:
    [line] = snippet.block.code.splitlines()
    assert [each["role"] for each in json.loads(line)["messages"]] == ["user", "assistant"]


def configured_providers(snippet: Snippet) -> None:
    file = snippet.folder / "config.yaml"
    file.write_text(snippet.block.code)
    listed = yaml.safe_load(snippet.block.code)["providers"]
    found = load_providers(file)
    assert list(found) == [each["name"] for each in listed]
    assert all(LLMProvider(each) for each in found.values())


def checksum(snippet: Snippet) -> None:
    [file] = (ROOT / snippet.block.document).parent.glob("*.xz")
    found = hashlib.sha256(lzma.decompress(file.read_bytes())).hexdigest()
    assert found == snippet.block.code.strip()
