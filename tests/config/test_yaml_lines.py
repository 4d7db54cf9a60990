"""YAML with its lines: hostile files are refused at once, and the line is named."""

import re
from pathlib import Path

import pytest

from mlx_server.errors import SettingsError
from tests.config.loading import load, problem, problems_of

pytestmark = pytest.mark.usefixtures("folder")


def bomb() -> str:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(["l0: &l0 [x, x]", *levels])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("server:\n\tport: 1\n", 2, r"YAML: found character '\\t'.*: indent with spaces"),
        ("server: {port: 1\n", 2, "YAML: .*line 1"),
        ("a: 'b\n\n", 3, "YAML: found unexpected end of stream .*quoted scalar, line 1"),
        ("server: {}\n---\nserver: {}\n", 2, "YAML: but found another document"),
        (bomb(), 2, "YAML aliases"),
        ("a: &a [*a]\n", 1, "YAML aliases"),
        ("a:\n  b: !!python/object/apply:os.system [ls]\n", 2, "YAML tags"),
        ("a: " + "[" * 100_000, 1, "is nested too deeply"),
        (b"# \xc3\xa4\nserver: \xff\n", 2, "is not UTF-8"),
        ("server:\n  host: a\0b\n", 2, "has a control character"),
        ("#" * (2 << 20), 0, "is larger than 1 MiB"),
    ],
)
def test_hostile_files_are_refused_at_once(text: str | bytes, line: int, message: str) -> None:
    found = problem(text)
    assert found.line == line
    assert re.match(message, found.message)


@pytest.mark.parametrize("value", ["1" * 5000, ":".join(["59"] * 5000), "2024-99-99", "<<", "="])
def test_values_that_yaml_chokes_on(value: str) -> None:
    found = problems_of(f"server:\n  host: h\n  port: {value}\n")
    assert {line for line, _ in found} == {3}
    assert found[0][1].startswith("server.port: can't be read")


def test_merge_keys_are_not_supported() -> None:
    assert problem("server:\n  <<: {port: 1}\n").message == "a key is not text: quote it"


def test_a_missing_file_a_folder_and_an_empty_file(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"^gone\.yaml:1: can't be read: No such file"):
        load(Path("gone.yaml"))
    with pytest.raises(SettingsError, match="can't be read: Is a directory"):
        load(folder)
    assert (
        problems_of("")
        == problems_of("# nothing\n")
        == problems_of("\ufeffserver: {port: 1}\r\n")
        == []
    )
