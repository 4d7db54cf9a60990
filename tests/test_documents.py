"""Every snippet of every document is run as far as possible here; every link leads somewhere.

`HOW` says how: one entry for each heading, one way for each fenced block under it.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.live.server import LiveServer, serving
from tests.snippets import (
    Block,
    NotHere,
    Run,
    Snippet,
    agents_loop,
    app_test_name,
    app_tests,
    attack,
    blocks,
    chats,
    checksum,
    commands,
    configured_providers,
    conversation,
    elsewhere,
    family,
    fills_in,
    fixture,
    generates,
    hostfile,
    is_shown,
    kills_engine,
    names_paris,
    outlives,
    output,
    python,
    python_printing,
    settings,
    shows_metrics,
    split_settings,
    transcript,
)

ROOT = Path(__file__).parents[1]
FOLDERS = (".github", "adapters", "mlx_server", "scripts", "tests")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for each in FOLDERS for path in (ROOT / each).rglob("*.md"))]
)

INSTALL = NotHere("It changes this machine; tests/live/test_wheel.py installs a wheel.")
IBM = NotHere(
    "IBM's package is too large to install; tests/clients/watsonx compares with its signatures."
)
WHEEL = NotHere("tests/live/test_wheel.py runs it from an installed wheel.")
KILLS = NotHere("It kills by name; tests/hostile/test_health.py kills an engine by its id.")
MAC = NotHere("Only a Mac has the program.")
GPU = NotHere("It wants a GPU; tests/system/test_scripts.py runs it with tiny models.")
OTHER = NotHere("It needs another machine; tests/cli/test_hosts.py plays one.")

Ways = tuple[Run | NotHere, ...]
HOW: dict[str, dict[str, Ways]] = {
    "README.md": {
        "mlx-server": (commands, names_paris, python, is_shown),
        "Install": (INSTALL, commands),
        "Your own models": (settings,),
        "Models on other servers": (elsewhere,),
        "Tools and reasoning": (WHEEL,),
        "Web search": (chats, is_shown, WHEEL, settings),
        "Structured output": (WHEEL,),
        "Work that can wait": (WHEEL,),
        "Answers outlive the engine": (outlives, kills_engine),
        "In your app's tests": (WHEEL, WHEEL),
    },
    "mlx_server/api/README.md": {
        "Fill in the middle": (fills_in,),
        "Responses": (python_printing("Paris", "Rome"),),
        "Messages": (python, is_shown),
        "Ollama": (python_printing("Paris"),),
    },
    "mlx_server/api/NATIVE.md": {"POST /generate": (generates, is_shown)},
    "mlx_server/engine/README.md": {
        "What each Mac needs": (MAC, OTHER),
        "The hostfile": (hostfile,),
        "The model": (split_settings, commands),
    },
    "mlx_server/sources/README.md": {"Replay models": (settings, transcript, agents_loop, fixture)},
    "mlx_server/sources/TESTING.md": {"Testing an app offline": (app_tests, app_tests)},
    "mlx_server/families/README.md": {
        "Adding a model family": (family,),
        "A new call format": (python_printing(),),
    },
    "mlx_server/clients/README.md": {
        "Reading what a model wrote": (python, is_shown),
        "LangChain": (python_printing("I should look it up.", "{'city': 'Paris'}"),),
        "One configuration for any backend": (
            python_printing("I should look it up."),
            configured_providers,
        ),
        "In place of IBM's SDK": (python_printing("I should look it up."), IBM),
    },
    "mlx_server/worker/CUDA.md": {"On an NVIDIA GPU": (INSTALL, GPU)},
    "mlx_server/prompts/harmony/data/README.md": {"o200k_base.tiktoken.xz": (checksum,)},
    "adapters/README.md": {
        "One per request": (python, is_shown),
        "Train your own": (conversation, commands),
        "Adapters from elsewhere": (settings,),
    },
    "tests/hostile/corpus/README.md": {"The hostile corpus": (attack,)},
    ".github/CONTRIBUTING.md": {"Contributing": (commands,)},
    ".github/MAC.md": {
        "On a Mac: ten commands": (
            *(commands, commands, names_paris, commands, commands, commands, commands),
            *(shows_metrics, KILLS, MAC, commands),
        ),
        "A model that sees": (MAC,),
    },
}
"""By document and heading: how each block there is run, in order."""


def blocks_by_heading() -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for block in (block for path in DOCUMENTS for block in blocks(path)):
        of_document = counts.setdefault(block.document, {})
        of_document[block.heading] = of_document.get(block.heading, 0) + 1
    return counts


def test_each_block_has_a_way_to_be_run() -> None:
    ways = {name: {at: len(each) for at, each in of.items()} for name, of in HOW.items()}
    assert ways == blocks_by_heading()


def cases() -> Iterator[Any]:
    for name, headings in HOW.items():
        found = list(blocks(ROOT / name))
        for heading, ways in headings.items():
            here = [block for block in found if block.heading == heading]
            for block, following, way in zip(here, [*here[1:], None], ways, strict=False):
                if not isinstance(way, NotHere) and way is not is_shown:
                    yield pytest.param(block, following, way, id=f"{name}:{block.line}")


@pytest.mark.slow
@pytest.mark.parametrize(("block", "following", "run"), list(cases()))
def test_each_block_runs(
    block: Block, following: Block | None, run: Run, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run(Snippet(block, following, tmp_path, request))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_stands_in_fences_that_name_a_language(path: Path) -> None:
    text = path.read_text("utf-8")
    assert [block for block in blocks(path) if not block.language] == []
    prose = re.sub(r"^( *)```\w+\n.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.sub(r"(?<!`)(`{4,}) .*? \1(?!`)", "", prose)  # code that shows a fence
    assert "```" not in spans
    outside_lists = re.sub(r"^(\d+\.|-) .*\n(?:(?: .*)?\n)*", "", prose, flags=re.MULTILINE)
    assert re.findall(r"\n\n {4,}[^\s].*", outside_lists) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_python_block_imports_is_installed_or_said(path: Path) -> None:
    """The document names it after `pip install`, or its extra, before the block or in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    comes = [re.split(r"\W", need.replace("-", "_"))[0] for need in project["dependencies"]]
    text = path.read_text("utf-8")
    for block in (block for block in blocks(path) if block.language == "python"):
        above = text.partition(block.code.splitlines()[-1])[0]
        said = re.findall(r"(?<=pip install ).*|`[a-z]+`(?=.* as in)", above)
        names = [*sys.stdlib_module_names, *comes, *re.findall(r"\w+", " ".join(said))]
        needs = re.findall(r"^ *(?:from|import) (\w+)", block.code, re.MULTILINE)
        assert [n for n in needs if not n.startswith(("mlx_server", *names))] == [], block.line


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_link_leads_to_a_file_and_a_heading_in_it(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.slow
def test_each_promise_names_tests_that_exist() -> None:
    """Their paths are from the root, or from the folder of the table."""
    folder = ROOT / "tests/hostile"
    promises = re.findall(
        r"^\| \d+ \|.*\| (.*) \|$", (folder / "README.md").read_text(), re.MULTILINE
    )
    paths = [path for shown in promises for path in re.findall(r"`(.*?)`", shown)]
    assert len(paths) >= len(promises) > 0
    assert [path for path in paths if not any((at / path).exists() for at in (ROOT, folder))] == []


def anchors(path: Path) -> set[str]:
    """As GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def ran_app_tests(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Those of all documents, on one server."""
    folder = tmp_path_factory.mktemp("app")
    for block, _, way in (param.values for param in cases()):
        if way is app_tests:
            (folder / f"{app_test_name(block)}.py").write_text(block.code)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "mlx_server.testing"]
    return output(command, folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_path: Path) -> Iterator[LiveServer]:
    """The models and connectors of models.yaml, and `fake` as it is in its document."""
    folder = tmp_path_factory.mktemp("documents")
    fake, answers, _ = (
        b.code for b in blocks(ROOT / "mlx_server/sources/README.md") if b.language == "yaml"
    )
    (folder / "answers.yaml").write_text(answers)
    shipped = yaml.safe_load((ROOT / "models.yaml").read_text())
    models = shipped["models"] | yaml.safe_load(fake)["models"]
    recorded = shipped["models"]["recorded"]["source"].removeprefix("replay:")
    models["recorded"]["source"] = f"replay:{ROOT / recorded}"
    connectors = shipped["connectors"]
    for program in connectors.values():
        program["command"] = sys.executable
    config = {"models": models, "connectors": connectors}
    config["server"] = {"adapters_dir": str(ROOT / "adapters")}
    with serving(folder, config) as server:
        yield server
        assert "Traceback" not in server.log
