"""The files of clients: their formats, and what is written into them."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mlx_server.clients.connect import (
    CannotMerge,
    ClientFile,
    ClientRecord,
    Connection,
    Format,
    changes,
    merged,
    parsed,
    with_content,
    write,
    written,
)
from mlx_server.errors import SettingsError
from tests.tables import cases

MODEL = {"name": "ours", "size": 1}


def added(text: str, content: Any, format: Format, **defaults: Any) -> str:
    return with_content(text, ClientFile("x", format, content, defaults), content)


@cases
def test_merging(before: Any, content: Any, after: Any) -> None:
    assert merged(before, content) == after
    assert merged(after, content) == after


@pytest.mark.parametrize("own", [[1], {"b": 1}])
def test_values_that_would_be_lost_are_not_merged_away(own: Any) -> None:
    with pytest.raises(CannotMerge, match="something else"):
        merged({"a": own}, {"a": "ours"})
    assert merged({"a": type(own)()}, {"a": "ours"}) == {"a": "ours"}


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"own": {"a": 1, "a": 2}}'])
def test_an_object_with_a_key_twice_is_left_alone(text: str) -> None:
    with pytest.raises(CannotMerge, match="twice"):
        added(text, {"b": [1]}, "json")


@cases
def test_yaml_and_toml_of_the_users_own_is_left_alone(text: str, format: Format) -> None:
    with pytest.raises(CannotMerge, match="of its own"):
        added(text, TOML if format == "toml" else {"models": [MODEL]}, format)


def test_a_file_with_nothing_but_comments_is_added_to() -> None:
    assert added("# mine", TOML, "toml") == "# mine\n" + written(TOML, "toml")
    assert added("# mine\n", [MODEL], "yaml") == "# mine\n" + written([MODEL], "yaml")


def test_defaults_are_only_for_files_without_them() -> None:
    assert parsed(added("", {"a": 1}, "yaml", version="2"), "yaml") == {"version": "2", "a": 1}
    assert parsed(added("b: 1\n", {"a": 1}, "yaml", b=2), "yaml") == {"b": 1, "a": 1}
    assert added("b: 1\na: 1\n", {"a": 1}, "yaml", b=2) == "b: 1\na: 1\n"
    assert parsed(added("{}", {"a": 1}, "json", b=2), "json") == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "format"),
    [
        ('// a comment\n{"a": 1}', "json"),
        ('{"a": 1,}', "json"),
        ("a: [", "yaml"),
        ("a: !!python/object:os.system x", "yaml"),
        ("a = ", "toml"),
        ("[" * 100_000, "json"),
    ],
)
def test_what_is_not_plain_is_left_alone(text: str, format: Format) -> None:
    with pytest.raises(CannotMerge, match="not plain"):
        added(text, {"b": 1}, format)


@pytest.mark.parametrize(
    ("text", "content", "format"),
    [("[1]", {"a": 1}, "json"), ("x", {"a": 1}, "yaml"), ("a: 1", [MODEL], "yaml")],
)
def test_a_file_of_another_kind_is_left_alone(text: str, content: Any, format: Format) -> None:
    with pytest.raises(CannotMerge, match="something else"):
        added(text, content, format)


TOML = {
    "model": 'a "b" \\ ü',
    "size": 5,
    "ok": True,
    "tables": {"a-b": {"url": "x"}, "c": {"n": 1}},
}


def test_a_toml_file_with_only_our_keys_is_written_anew() -> None:
    before = written(TOML, "toml")
    assert added(before, TOML, "toml") == before
    after = added(before, {**TOML, "size": 6}, "toml")
    assert tomllib.loads(after) == {**TOML, "size": 6}


HERE = Connection("http://127.0.0.1:8000", "none", "m", 4096)


def record(path: Path) -> ClientRecord:
    return ClientRecord("a client", (ClientFile(str(path), "json", {"model": "{model}"}),), ("a",))


def test_each_backup_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for number in range(3):
        path.write_text(f'{{"own": {number}}}')
        list(write(changes(record(path), HERE)))
    names = ("x.json.backup", "x.json.backup-1", "x.json.backup-2")
    assert [(tmp_path / name).read_text() for name in names] == [
        f'{{"own": {i}}}' for i in range(3)
    ]


def test_a_link_stays_a_link_and_a_mode_stays_too(tmp_path: Path) -> None:
    file, link = tmp_path / "real.json", tmp_path / "x.json"
    file.write_text("{}")
    file.chmod(0o640)
    link.symlink_to(file)
    list(write(changes(record(link), HERE)))
    assert link.is_symlink()
    assert '"m"' in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_file_that_can_not_be_added_to_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("// mine\n{}")
    with pytest.raises(SettingsError, match=r"without losing something[\s\S]*Add this[\s\S]*\"m\""):
        changes(record(path), HERE)
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_what_its_owner_writes_meanwhile_is_kept(tmp_path: Path) -> None:
    """As clients do that are running."""
    path = tmp_path / "x.json"
    for before in ('{"own": 1}', None):
        path.unlink(missing_ok=True)
        if before:
            path.write_text(before)
        found = changes(record(path), HERE)
        path.write_text('{"own": 2}')
        with pytest.raises(SettingsError, match=r"can't be written.*changed meanwhile"):
            list(write(found))
        assert path.read_text() == '{"own": 2}'
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_could_not_be_written_again_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(r'{"own": "\ud800"}')
    with pytest.raises(SettingsError, match="surrogate"):
        changes(record(path), HERE)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SettingsError, match="can't be read"):
        changes(record(path), HERE)
