"""`mlx-server models`: the models of a running server, and those on this machine."""

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from mlx_server.cli import app, machine_checks, pull
from mlx_server.cli.models import COLUMNS, SUGGESTED_COLUMNS, fits, show, show_local, show_served
from mlx_server.errors import ServerError
from mlx_server.sources.local import LocalModel


def test_models_local_shows_them(studio: Path) -> None:
    result = CliRunner().invoke(app, ["models", "--local"])
    assert result.exit_code == 0
    assert "org/one" in result.output
    assert f"source: {studio / 'two'}" in result.output


def test_models_local_keeps_to_the_budget_of_models_yaml(studio: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("server: {memory_budget: 10}", "utf-8")
    result = CliRunner().invoke(app, ["models", "--local", "--config", str(file)])
    assert result.exit_code == 0
    assert result.output.count("no: too large") == 2
    assert "models.yaml" not in result.output, "none of them can be served"


URL = "http://127.0.0.1:8000"
MEMORY = {"budget": 12_000_000_000, "used": 1_500_000_000, "kv_reserved": 0, "prompt_cache": 300}
MODEL = {
    "id": "tiny",
    "aliases": [],
    "family": "plain",
    "source": "/models/tiny",
    "state": "ready",
    "leases": 2,
    "bytes": 1_234_000_000,
    "last_used": None,
    "pinned": False,
    "ttl": None,
    "progress": None,
    "prefilling": [],
    "error": None,
}


def pool(*models: dict[str, Any]) -> dict[str, Any]:
    return {"object": "pool", "memory": MEMORY, "models": [{**MODEL, **model} for model in models]}


def shown(found: dict[str, Any], *, terminal: bool = False, width: int = 80) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, color_system=None)
    show(found, console)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def cells(line: str) -> list[str]:
    return [cell for cell in (part.strip() for part in line.split("  ")) if cell]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_a_model_and_one_for_the_whole(terminal: bool) -> None:
    unseen = {"id": "b", "family": None, "state": "unloaded", "leases": 0, "bytes": 0}
    header, tiny, other, last = shown(pool({}, unseen), terminal=terminal)
    assert cells(header) == list(COLUMNS)
    assert cells(tiny) == ["tiny", "plain", "/models/tiny", "ready", "2", "1.2 GB", "-"]
    assert cells(other) == ["b", "-", "/models/tiny", "unloaded", "0", "0 bytes", "-"]
    assert last == "1.5 GB of 12.0 GB in use, 300 bytes of it by the prompt cache"


def test_how_much_of_a_prompt_is_computed() -> None:
    row = {"prompt_tokens": 30_000, "computed_tokens": 8_192}
    *_, line, _ = shown(pool({"prefilling": [row]}))
    assert line == "tiny: prefill, 8,192 of 30,000 prompt tokens computed"


def test_a_pipe_gets_every_line_whole() -> None:
    source, error = "/models/" + "long" * 100, "It can't be read. " * 30
    _, line, reported, _ = shown(pool({"source": source, "error": error}))
    assert source in line
    assert reported == f"tiny failed: {error}".rstrip()


def test_a_terminal_gets_a_table_that_fits() -> None:
    source = "/models/" + "long" * 100
    _, line, *more, _ = shown(pool({"source": source}), terminal=True)
    assert all(len(each) <= 80 for each in (line, *more))
    first, family, folded, *rest = cells(line)
    assert (first, family, rest) == ("tiny", "plain", ["ready", "2", "1.2 GB", "-"])
    assert folded + "".join(each.strip() for each in more) == source


def test_no_control_characters_get_through() -> None:
    assert "\x1b" not in "".join(shown(pool({"id": "a\x1b[2Jb", "error": "\x1b[2J"})))


@pytest.mark.parametrize(
    ("state", "done", "total", "reported"),
    [
        ("loading", 1, 3, "loading 33 %"),
        ("preparing", 0, 10, "preparing 0 %"),
        ("loading", 10, 10, "loading 100 %"),
    ],
)
def test_progress_is_a_percentage(state: str, done: int, total: int, reported: str) -> None:
    progress = {"what": "downloading", "done": done, "total": total}
    _, line, _ = shown(pool({"state": state, "progress": progress}))
    assert reported in cells(line)


@pytest.mark.parametrize(
    ("seconds", "reported"),
    [(-5, "0 s"), (5, "5 s"), (59, "59 s"), (60, "1 min"), (7300, "2 h"), (300_000, "3 d")],
)
def test_when_it_was_last_used(
    seconds: float, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000_000.0)
    _, line, _ = shown(pool({"last_used": 1_000_000_000.0 - seconds}))
    assert cells(line)[-1] == f"{reported} ago"


def answering(response: httpx.Response) -> httpx.Client:
    return httpx.Client(base_url=URL, transport=httpx.MockTransport(lambda request: response))


def refused(response: httpx.Response) -> str:
    with answering(response) as client, pytest.raises(ServerError) as caught:
        show_served(client, Console())
    return caught.value.message


def test_a_refusal_is_passed_on() -> None:
    body = {"error": {"message": "The key is not known here.", "type": "x"}}
    message = refused(httpx.Response(401, json=body))
    assert message == "The key is not known here. Give the key with --api-key."


@pytest.mark.parametrize("text", ["not found", '{"error": {"message": "File Not Found"}}'])
def test_a_server_that_has_no_pool_is_named(text: str) -> None:
    message = refused(httpx.Response(404, text=text))
    assert message.startswith(f"The server at {URL} is not mlx-server. Set --url")


@pytest.mark.parametrize("status", [200, 502])
def test_no_page_of_somebody_elses_server_is_shown(status: int) -> None:
    message = refused(httpx.Response(status, text="<html><h1>Not here</h1></html>"))
    assert f"(HTTP {status})" in message
    assert "--url" in message
    assert "<" not in message


@pytest.mark.parametrize(
    "text",
    [
        *("<html>", "[]", "{}", '{"object": "list"}', "null", "5", "[" * 100_000, "9" * 5000, ""),
        '{"object": "pool"}',
        '{"object": "pool", "models": null, "memory": null}',
        json.dumps(pool({"progress": {"done": 1, "total": 0}})),
        json.dumps(pool({"id": 5})),
        json.dumps({**pool({}), "memory": {}}),
    ],
)
def test_another_server_is_told_apart(text: str) -> None:
    assert "--url" in refused(httpx.Response(200, text=text))


def test_no_password_is_shown() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="{}"))
    with (
        httpx.Client(base_url="http://me:hunter2@host?k=hunter2", transport=transport) as client,
        pytest.raises(ServerError, match=r"at http://host is not") as caught,
    ):
        show_served(client, Console())
    assert "hunter2" not in caught.value.message


def test_no_server_at_all() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    with (
        httpx.Client(base_url=URL, transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(ServerError, match=r"Connection refused.*mlx-server serve"),
    ):
        show_served(client, Console())


def test_the_table_ends_with_lines_for_models_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    models = [
        LocalModel("org/small", "org/small", "qwen3", 10),
        LocalModel("org/large", "/models/large: 1", "qwen3", 1000),
        LocalModel("org/odd", "/odd", "-", 0, "has no tokenizer"),
    ]
    show_local(models, 100, Console(force_terminal=False))
    table, _, lines = capsys.readouterr().out.partition("For models.yaml:")
    assert "too large" in table
    assert "org/odd: has no tokenizer" in table
    assert yaml.safe_load(lines) == {"models": {"org/small": {"source": "org/small"}}}


def shown_here(*models: LocalModel, budget: int = 100, is_terminal: bool = False) -> str:
    file = io.StringIO()
    show_local(models, budget, Console(file=file, force_terminal=is_terminal, width=40))
    return file.getvalue()


def test_without_checkpoints_it_is_said_how_to_get_one() -> None:
    assert "`mlx-server pull" in shown_here()


@pytest.mark.parametrize(
    ("nbytes", "problem", "does"),
    [(100, "", True), (101, "", False), (0, "is damaged", False), (10**12, "is damaged", False)],
)
def test_what_fits_the_budget_to_the_byte_is_served(nbytes: int, problem: str, does: bool) -> None:
    model = LocalModel("org/m", "org/m", "qwen3", nbytes, problem)
    assert fits(model, 100) is does
    assert ("For models.yaml:" in shown_here(model)) is does


@pytest.mark.parametrize(
    ("id", "source"),
    [
        ("org/[bold]m[/]", "/models/[red]x"),
        ("org/m: 1", "/models/a # b"),
        ("org/null", "null"),
        ("org/ä", "/模型/" + "long " * 300),
        ("org/m", "/models/a\nb"),
    ],
)
def test_lines_for_models_yaml_have_the_name_whatever_is_in_it(id: str, source: str) -> None:
    _, _, lines = shown_here(LocalModel(id, source, "qwen3", 1)).partition("For models.yaml:")
    assert yaml.safe_load(lines) == {"models": {id: {"source": source}}}


def test_a_checkpoint_has_no_power_over_the_terminal() -> None:
    name = "org/\x1b[2J\x07m"
    assert not {"\x1b", "\x07"} & {
        *shown_here(LocalModel(name, name, "qwen3", 1)),
        *shown_here(LocalModel(name, name, "-", 0, "has the type \x1b]0;x\x07")),
    }


def test_models_are_suggested_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("server: {memory_budget: 7GB}", "utf-8")
    asking = ["models", "--suggest", "--config", str(file)]
    lines = CliRunner().invoke(app, asking).output.splitlines()
    assert cells(lines[0]) == list(SUGGESTED_COLUMNS)
    id, size, _, good_at, is_here = cells(lines[-3])
    assert (id, size) == ("Qwen3.5-9B-4bit", "6.0 GB")
    assert (good_at, is_here) == ("reasoning, tools, agents on 16 GB", "no")
    assert lines[-2].startswith("Of 13 suggestions, 5 fit the memory budget of 7.0 GB")
    assert lines[-1] == f"Fetch one with: mlx-server pull mlx-community/{id}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = CliRunner().invoke(app, asking).output.splitlines()
    assert lines[0].startswith("HF_HUB_OFFLINE is set, so nothing can be fetched")
    assert not any("gpt-oss" in line for line in lines)


@pytest.mark.usefixtures("studio")
def test_pull_keeps_to_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger is refused before it is fetched: see tests/sources/test_hub.py."""
    file = tmp_path / "small.yaml"
    file.write_text("server: {memory_budget: 10}", "utf-8")
    asked: list[tuple[str, int]] = []

    def resolve(source: str, *_: object, budget: int, **__: object) -> Path:
        asked.append((source, budget))
        return tmp_path

    monkeypatch.setattr(pull, "resolve", resolve)
    result = CliRunner().invoke(app, ["pull", "org/name", "--config", str(file)])
    assert result.exit_code == 0
    assert asked == [("org/name", 10)]
    CliRunner().invoke(app, ["pull", "qwen3.5-9b", "--config", str(file)])
    assert asked[1:] == [("mlx-community/Qwen3.5-9B-4bit", 10)]
    unknown = CliRunner().invoke(app, ["pull", "qwen3", "--config", str(file)])
    assert unknown.exit_code == 1
    assert len(asked) == 2


METAL = """
import json
print(json.dumps({"version": "1", "gpu": True, "name": "M", "working_set": 700_000_000}))
"""


@pytest.mark.usefixtures("studio")
@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_on_a_mac_the_budget_is_what_metal_recommends(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(machine_checks, "PROBE", METAL)
    budget = machine_checks.budget_here(None)
    assert budget.gpu is (system == "darwin")
    assert (budget.nbytes < 700_000_000) is budget.gpu
    assert machine_checks.budget_here(10).nbytes == 10
    asked: list[int] = []

    def resolve(source: str, *_: object, budget: int, **__: object) -> Path:
        asked.append(budget)
        return tmp_path

    monkeypatch.setattr(pull, "resolve", resolve)
    CliRunner().invoke(app, ["pull", "org/name"])
    assert asked == [budget.nbytes]
