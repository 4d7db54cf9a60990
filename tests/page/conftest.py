"""One server and one browser for all tests of the page; a tab of its own for each test."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live.server import LiveServer, serving
from tests.page.browser import Browser, Tab, browsing, executable, foreign
from tests.page.played import ENTRIES
from tests.worker.lora_files import mlx_adapter

MARKUP = "<img src=x onerror=alert(1)>"
"""A name that a page could take for HTML."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[LiveServer]:
    """Two families play the same recordings; `tiny` has random weights and an adapter."""
    folder = tmp_path_factory.mktemp("page")
    adapter = mlx_adapter(folder / "lora", tiny_path)
    (folder / "learnt").mkdir()
    lines = "\n".join(json.dumps(entry) for entry in ENTRIES)
    (folder / "said.jsonl").write_text(lines, "utf-8")
    models = {
        "qwen": {"source": "replay:said.jsonl", "family": "qwen3"},
        "glm": {"source": "replay:said.jsonl", "family": "glm4_5"},
        "tiny": {
            "source": str(tiny_path),
            "adapters": {"pirate": str(adapter)},
            "aliases": [MARKUP],
            "ttl": 3600,
        },
    }
    sample = {"command": sys.executable, "args": ["-m", "mlx_server.mcp.sample"]}
    settings = {
        "models": models,
        "connectors": {"release-notes": sample},
        "server": {"page": "texts", "adapters_dir": str(folder / "learnt")},
    }
    with serving(folder, settings) as server:
        yield server
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = executable()
    assert program
    with browsing(program, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@contextmanager
def opened(browser: Browser) -> Iterator[Tab]:
    """Empty. Whatever the test does there leaves no error in the console."""
    tab = browser.open()
    yield tab
    tab.evaluate("0")  # what the page has reported until now arrives before the result
    tab.close()
    assert tab.problems == []


@pytest.fixture
def new_tab(browser: Browser) -> Iterator[Tab]:
    with opened(browser) as tab:
        yield tab


@pytest.fixture
def talk(new_tab: Tab, server: LiveServer) -> Iterator[Tab]:
    """The view Talk, with its models; the page asks no other server for anything."""
    new_tab.goto(f"{server.url}/#talk")
    new_tab.until("document.querySelector('#model')?.value")
    yield new_tab
    assert foreign(new_tab.requests, server.url) == []
