"""`mlx-server models --local`: a table, what is wrong, and lines that can be copied."""

import io

import pytest
import yaml
from rich.console import Console

from mlx_server.cli.tables import local
from mlx_server.sources.local import LocalModel


def test_the_table_ends_with_lines_for_models_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    models = [
        LocalModel("org/small", "org/small", "qwen3", 10),
        LocalModel("org/large", "/models/large: 1", "qwen3", 1000),
        LocalModel("org/odd", "/odd", "-", 0, "has no tokenizer"),
    ]
    local.show(models, 100, Console(force_terminal=False))
    table, _, lines = capsys.readouterr().out.partition("For models.yaml:")
    assert "too large" in table
    assert "org/odd: has no tokenizer" in table
    assert yaml.safe_load(lines) == {"models": {"org/small": {"source": "org/small"}}}


def shown(*models: LocalModel, budget: int = 100, is_terminal: bool = False) -> str:
    file = io.StringIO()
    local.show(models, budget, Console(file=file, force_terminal=is_terminal, width=40))
    return file.getvalue()


def test_without_checkpoints_it_is_said_how_to_get_one() -> None:
    assert "`mlx-server pull" in shown()


@pytest.mark.parametrize(
    ("nbytes", "problem", "fits"),
    [(100, "", True), (101, "", False), (0, "is damaged", False), (10**12, "is damaged", False)],
)
def test_what_fits_the_budget_to_the_byte_is_served(nbytes: int, problem: str, fits: bool) -> None:
    model = LocalModel("org/m", "org/m", "qwen3", nbytes, problem)
    assert local.fits(model, 100) is fits
    assert ("For models.yaml:" in shown(model)) is fits


def test_weights_that_nobody_could_measure_have_no_size() -> None:
    row = shown(LocalModel("org/m", "org/m", "-", 0, "is damaged")).splitlines()[1]
    assert row.split() == ["org/m", "-", "-", "no:", "see", "below"]
    row = shown(LocalModel("org/m", "org/m", "qwen3", 1_250_000_000)).splitlines()[1]
    assert row.split() == ["org/m", "qwen3", "1.2", "GB", "no:", "too", "large"]


def test_a_pipe_gets_a_row_in_one_line_however_narrow_the_terminal_is() -> None:
    model = LocalModel(f"org/{'x' * 200}", "/m", "qwen3", 1)
    assert shown(model).splitlines()[1].startswith(model.id)
    assert not any(line.startswith(model.id) for line in shown(model, is_terminal=True).split("\n"))


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
    _, _, lines = shown(LocalModel(id, source, "qwen3", 1)).partition("For models.yaml:")
    assert yaml.safe_load(lines) == {"models": {id: {"source": source}}}


def test_a_checkpoint_has_no_power_over_the_terminal() -> None:
    name = "org/\x1b[2J\x07m"
    assert not {"\x1b", "\x07"} & {
        *shown(LocalModel(name, name, "qwen3", 1)),
        *shown(LocalModel(name, name, "-", 0, "has the type \x1b]0;x\x07")),
    }
