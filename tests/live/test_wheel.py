"""The package as a newcomer gets it: a wheel in an environment with no repository around it."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import DEMO, LiveServer, serving
from tests.snippets import URL, Block, blocks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PIP = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--quiet"]


@dataclass(frozen=True)
class Installed:
    folder: Path
    """What is run begins here."""
    server: LiveServer

    def run(self, *command: str) -> str:
        ran = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, demo_path: Path) -> Iterator[Installed]:
    """It serves what `mlx-server init` writes. What the wheel depends on is not installed again."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", str(ROOT)]
    subprocess.run(build, check=True, cwd=folder)
    [wheel] = folder.glob("mlx_local_server-*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    install = ["--python", str(python), "install", "--no-compile", "--no-deps", str(wheel)]
    subprocess.run([*PIP, *install], check=True)
    [site] = (folder / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        patch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
        patch.setattr(sys, "executable", str(python))
        subprocess.run(["mlx-server", "init"], check=True, cwd=folder)
        with serving(folder) as server:
            yield Installed(folder, server)


def test_what_init_writes_is_served_and_the_demo_answers_with_no_sampling_parameters(
    installed: Installed,
) -> None:
    where = installed.run("python", "-c", "import mlx_server; print(mlx_server.__file__)")
    assert where.startswith(str(installed.folder))
    question: Any = {"role": "user", "content": "What is the capital of France?"}
    with installed.server.openai() as client:
        answers = [
            client.chat.completions.create(
                model=DEMO, messages=[question], seed=seed, max_tokens=40
            )
            for seed in range(3)
        ]
    assert ["Paris" in (answer.choices[0].message.content or "") for answer in answers] == [
        True
    ] * 3
    with installed.server.http() as http:
        page = http.get("/", headers={"accept": "text/html"})
        assert "/page/app.js" in page.text
        assert http.get("/page/app.js").status_code == 200


OF_A_CLONE = re.compile(r"^(scripts/|uv tool install \.)", re.MULTILINE)


ELSEWHERE = re.compile(r"mlx-server init|pkill|Tell me a long story")
"""Blocks that this file has run already, or that would end the engines of other servers, and the
one whose engine tests/test_documents.py kills."""


def test_the_readmes_blocks_run_or_say_that_they_are_of_a_clone(installed: Installed) -> None:
    paragraphs = README.read_text("utf-8").split("\n\n")
    printed, codes = "", list[str]()
    for block in blocks(README):
        if OF_A_CLONE.search(block.code):
            [at] = (n for n, text in enumerate(paragraphs) if block.code.splitlines()[0] in text)
            assert "clone" in paragraphs[at - 1] + paragraphs[at + 1], block
        elif block.language == "python" and "\ndef test_" in block.code:
            (installed.folder / "test_app.py").write_text(block.code)
        elif block.language == "python":
            codes.append(here(block, installed.server))
        elif block.language == "sh" and not ELSEWHERE.search(block.code):
            printed += installed.run("sh", "-ec", here(block, installed.server))
    # in one interpreter: the import of a client takes longer than its use
    printed += installed.run("python", "-c", f"for code in {codes}: exec(code, {{}})")
    for expected in (
        *("The capital of France is Paris", "The capital of Japan is Tokyo"),
        "The capital of Germany is Berlin",
        *("I should look it up.\n", "name='Paris' country='France' is_capital=True", "1 passed"),
        """Function(arguments='{"city": "Paris"}', name='get_weather')\n""",
    ):
        assert expected in printed, printed
    assert printed.count("It starts faster.\n") == 2


def here(block: Block, server: LiveServer) -> str:
    """It asks the test's server, in the middle of its answers, and installs nothing."""
    code = block.code.replace(URL, server.url).replace("max_tokens=200", "max_tokens=40")
    code = re.sub(r"^pip install .*\n", "", code, flags=re.MULTILINE)
    code = code.replace("curl ", "curl -sS --noproxy '*' ")
    return code.replace("mlx-server chat ", f"mlx-server chat --url {server.url} ")
