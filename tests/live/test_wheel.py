"""The package as a newcomer gets it: a wheel, installed where no repository is around it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import DEMO, serving

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's own files and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", str(ROOT)]
    subprocess.run(build, check=True, cwd=folder)
    [wheel] = folder.glob("mlx_local_server-*.whl")
    site = folder / "site"
    subprocess.run(
        [*PIP, "install", "--no-compile", "--no-deps", f"--target={site}", str(wheel)], check=True
    )
    return site


def test_what_init_writes_is_served_and_the_demo_answers_with_no_sampling_parameters(
    installed: Path, demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{installed}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    code = "import mlx_server; print(mlx_server.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert where.startswith(str(installed))
    subprocess.run([sys.executable, "-m", "mlx_server", "init"], check=True, cwd=tmp_path)
    notes: Any = {
        "type": "mcp",
        "server_label": "notes",
        "connector_id": "release-notes",
        "require_approval": "never",
    }
    question: Any = {"role": "user", "content": "What is the capital of France?"}
    with serving(tmp_path) as server, server.openai() as client:
        answers = [
            client.chat.completions.create(
                model=DEMO, messages=[question], seed=seed, max_tokens=40
            )
            for seed in range(3)
        ]
        recorded = client.responses.create(
            model="recorded",
            input="What changed in the last release?",
            tools=[notes],
        )
        assert recorded.output_text == "It starts faster."
        with server.http() as http:
            page = http.get("/", headers={"accept": "text/html"})
            assert "/page/app.js" in page.text
            assert http.get("/page/app.js").status_code == 200
    assert ["Paris" in (answer.choices[0].message.content or "") for answer in answers] == [
        True
    ] * 3
