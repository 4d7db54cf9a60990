"""What each client's files hold once they are written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance_parts.connected import AGENTS
from conformance_parts.installed import CLAUDE_CODE

from mlx_server.clients.connect.clients import CLIENTS, ClientFile, ClientRecord, Connection, filled
from mlx_server.clients.connect.writing import changes, parsed, write
from mlx_server.clients.connect.writing import written as text_of

HERE = Connection("http://127.0.0.1:8123", "a-secret-key", "org/some-model:tuned", 12_288)
OTHER = Connection("http://127.0.0.1:8123", "a-secret-key", "another", 4096)

EACH = pytest.mark.parametrize(
    "client", [pytest.param(each, id=id) for id, each in CLIENTS.items()]
)
FILES = pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=f"{id}-{number}")
        for id, each in CLIENTS.items()
        for number, file in enumerate(each.files)
    ],
)
OWN: dict[str, Any] = {
    "json": {"theirs": {"deep": [1, {"id": "x"}]}, "also": "ü"},
    "yaml": {"theirs": {"deep": [1, {"id": "x"}]}, "also": "ü"},
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def path_of(file: ClientFile) -> Path:
    return Path(file.path).expanduser()


def held(file: ClientFile) -> Any:
    return parsed(path_of(file).read_text("utf-8"), file.format)


def values(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield name
            yield from values(value)
    elif isinstance(node, list):
        for value in node:
            yield from values(value)
    else:
        yield node


def written(client: ClientRecord, connection: Connection = HERE) -> list[str]:
    return list(write(changes(client, connection)))


@EACH
def test_it_learns_all_that_it_has_to_know(client: ClientRecord) -> None:
    written(client)
    found = [value for file in client.files for value in values(held(file))]
    found += filled(client.environment, HERE).values()
    texts = [value for value in found if isinstance(value, str)]
    assert any(value.startswith(HERE.url) for value in texts)
    assert any(HERE.model in value for value in texts)
    assert any(HERE.key in value for value in texts)
    is_told = HERE.context in found or str(HERE.context) in found
    assert is_told or "no setting for the length" in client.note


def test_the_versions_are_those_that_are_driven() -> None:
    tested = {name: client.tested for name, client in CLIENTS.items() if client.tested}
    driven = {name: agent.package for name, agent in AGENTS.items()} | {"claude": CLAUDE_CODE}
    assert tested.keys() == driven.keys()
    assert all(driven[name].endswith(version) for name, version in tested.items())


@EACH
def test_nothing_is_left_to_be_filled_in(client: ClientRecord) -> None:
    for file in client.files:
        assert not [
            v for v in values(filled(file.content, HERE)) if isinstance(v, str) and "{" in v
        ]
    texts = [*filled(client.environment, HERE).values(), *filled(client.command, HERE)]
    assert not [text for text in texts if "{" in text]


@EACH
def test_a_second_time_changes_nothing(client: ClientRecord) -> None:
    written(client)
    before = {file.path: path_of(file).read_bytes() for file in client.files}
    assert all(sentence.endswith("has it already.") for sentence in written(client))
    assert {file.path: path_of(file).read_bytes() for file in client.files} == before
    assert not list(Path.home().rglob("*.backup*"))


@EACH
def test_another_model_takes_its_place(client: ClientRecord) -> None:
    written(client)
    written(client, OTHER)
    for file in client.files:
        found = list(values(held(file)))
        assert any(isinstance(value, str) and OTHER.model in value for value in found)


@FILES
def test_what_else_is_in_a_file_stays(file: ClientFile) -> None:
    if isinstance(file.content, list) or file.format == "toml":
        return  # their own tests are below
    client = ClientRecord("a client", (file,), ("a",))
    path = path_of(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = text_of(OWN[file.format], file.format)
    path.write_text(before, "utf-8")
    (sentence,) = written(client)
    assert sentence.endswith(f"It was {path.name}.backup before.")
    assert {name: held(file)[name] for name in OWN[file.format]} == OWN[file.format]
    assert path.with_name(f"{path.name}.backup").read_text("utf-8") == before
    assert written(client)[0].endswith("has it already.")


@EACH
def test_files_with_a_key_are_private(client: ClientRecord) -> None:
    written(client)
    for file in client.files:
        assert path_of(file).stat().st_mode & 0o077 == 0
