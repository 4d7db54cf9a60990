"""`mlx-server adapters`: which adapters fit which models, and what is wrong with the rest."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlx_server.cli import app
from mlx_server.cli.adapters import COLUMNS, AdapterRow, rows_of, show
from mlx_server.config.models_yaml import load_settings
from mlx_server.models.adapter_config import CONFIG
from tests.models.adapter_files import IN, LAYER, OUT, RANK, mlx_adapter, numbers, peft_adapter
from tests.models.test_adapter_base import checkpoint


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two models, of which the adapters fit `Tiny-1B` only, and nothing in any cache."""
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("MLX_SERVER_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "Tiny-1B", {f"{LAYER}.weight": numbers(OUT, IN)})
    checkpoint(tmp_path / "Wide-1B", {f"{LAYER}.weight": numbers(OUT, IN + 1)})
    return tmp_path


def models(folder: Path, **adapters: str) -> None:
    listed = ", ".join(f"{name}: {entry}" for name, entry in adapters.items())
    (folder / "models.yaml").write_text(
        f"models:\n  tiny: {{source: ./Tiny-1B, adapters: {{{listed}}}}}\n"
        "  wide: {source: ./Wide-1B}\n"
    )


def rows() -> list[AdapterRow]:
    return rows_of(load_settings(None, environ={}))


def shown(*, terminal: bool = False) -> tuple[list[str], bool]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=160, color_system=None)
    fine = show(rows(), console)
    return [line.rstrip() for line in file.getvalue().splitlines()], fine


def cells(line: str) -> list[str]:
    return [cell for cell in (part.strip() for part in line.split("  ")) if cell]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_for_each(folder: Path, terminal: bool) -> None:
    mlx_adapter(folder / "adapters" / "a", model=None)
    peft_adapter(folder / "lora" / "b")
    models(folder, b="./lora/b")
    (header, a, b), fine = shown(terminal=terminal)
    digests = [row.spec.digest[:8] for row in rows() if row.spec]
    assert cells(header) == list(COLUMNS)
    size = f"{2 * RANK * (IN + OUT)} bytes"
    assert cells(a) == ["a", "tiny", "lora", "mlx", "4", size, "-", digests[0], "ok"]
    assert cells(b) == ["b", "tiny", "lora", "peft", "4", size, "org/Tiny-1B", digests[1], "ok"]
    assert fine


def test_one_that_fits_no_model_is_wrong(folder: Path) -> None:
    mlx_adapter(folder / "adapters" / "a", lora_parameters={"rank": 10_000, "scale": 1})
    models(folder)
    (_, a, why), fine = shown()
    assert cells(a) == ["a", *["-"] * 7, "wrong"]
    assert why.startswith("a: Adapter 'a' is refused")
    assert "10000" in why
    assert not fine


def test_a_listed_one_must_fit_its_model(folder: Path) -> None:
    mlx_adapter(folder / "lora" / "b", model="org/Other")
    models(folder, b="./lora/b")
    assert not shown()[1]
    models(folder, b="{path: ./lora/b, allow_other_base: true}")
    assert shown()[1]


def test_a_name_for_two_adapters_is_two_lines(folder: Path) -> None:
    mlx_adapter(folder / "adapters" / "a", model=None)
    peft_adapter(folder / "lora" / "a")
    models(folder, a="./lora/a")
    listed, from_folder = sorted(rows(), key=lambda row: not row.is_ok)
    assert (listed.models, listed.is_ok) == (["tiny"], True)
    assert (from_folder.models, from_folder.is_ok) == ([], False), "wide does not fit"


def test_text_of_an_adapter_cannot_steer_the_terminal(folder: Path) -> None:
    mlx_adapter(folder / "adapters" / "a", model="[red]\x1b[2J")
    (folder / "models.yaml").write_text(
        "models:\n  m:\n    source: ./Tiny-1B\n"
        "    adapters: {a: {path: adapters/a, allow_other_base: true}}\n"
    )
    lines, _ = shown(terminal=True)
    assert "[red] [2J" in lines[1]


def command(*arguments: str) -> tuple[int, str]:
    result: Any = CliRunner().invoke(app, ["adapters", *arguments])
    return result.exit_code, result.output


def test_the_exit_code_tells_whether_all_are_fine(folder: Path) -> None:
    models(folder)
    assert command() == (0, "There are no adapters. `mlx-server train` makes one in adapters/.\n")
    mlx_adapter(folder / "adapters" / "a")
    assert command()[0] == 0
    (folder / "adapters" / "a" / CONFIG).unlink()
    code, said = command("--config", "models.yaml")
    assert code == 1
    assert f"has no {CONFIG}" in said
