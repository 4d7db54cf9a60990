"""scripts/test --all: it fails where the tests leave too much of the pure packages unrun."""

import json
import tomllib
from pathlib import Path

import pytest
from test_parts.__main__ import SCRIPTS, is_covered

FILE = {"executed_lines": [1, 2], "missing_lines": [7], "summary": {"percent_covered": 66.7}}
FLOOR = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text("utf-8"))["tool"]["slipcover"][
    "fail-under"
]


@pytest.mark.parametrize(("over", "enough"), [(-0.1, False), (0.0, True), (1.0, True)])
def test_as_much_as_pyproject_says(
    over: float,
    enough: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(SCRIPTS.parent)
    measured = tmp_path / "coverage.json"
    summary = {"percent_covered": FLOOR + over}
    measured.write_text(json.dumps({"files": {"some.py": FILE}, "summary": summary}))
    assert is_covered(measured) == enough
    assert "some.py" in capfd.readouterr().out


def test_nothing_measured_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPTS.parent)
    assert not is_covered(tmp_path / "coverage.json")
