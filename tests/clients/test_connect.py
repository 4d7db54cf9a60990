"""`mlx-server connect`: what each client's files hold once they are written, and what is shown."""

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from conformance_parts.connected import AGENTS
from conformance_parts.installed import CLAUDE_CODE
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from mlx_server.clients.connect import (
    CLIENTS,
    CONTEXT,
    NO_KEY,
    CannotMerge,
    ClientFile,
    ClientRecord,
    Connection,
    Format,
    changes,
    command_of,
    connection_to,
    filled,
    listing,
    markdown,
    merged,
    parsed,
    shown,
    with_content,
    write,
)
from mlx_server.clients.connect import written as text_of
from mlx_server.errors import ServerError, SettingsError
from tests.cli.test_chat import NO_URLS
from tests.hostile.upstreams import RawServer, http_answer, key_of
from tests.tables import cases

HERE = Connection("http://127.0.0.1:8123", "a-secret-key", "org/some-model:tuned", 12_288)
OTHER = Connection("http://127.0.0.1:8123", "a-secret-key", "another", 4096)
NOWHERE = "http://127.0.0.1:9"
MODELS = {"data": [{"id": "org/m"}, {"id": "other"}]}
README = Path(__file__).parents[2] / "mlx_server" / "clients" / "README.md"

EACH = pytest.mark.parametrize("name", CLIENTS)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MLX_SERVER_API_KEYS", raising=False)
    for each in CLIENTS.values():
        (tmp_path / each.command[0]).touch(mode=0o755)
    return tmp_path


def path_of(file: ClientFile) -> Path:
    return Path(file.place).expanduser()


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
def test_its_files_have_all_that_it_has_to_know(name: str) -> None:
    client = CLIENTS[name]
    written(client)
    found = [value for file in client.files for value in values(held(file))]
    found += filled(client.environment, HERE).values()
    found += filled(client.note, HERE).split()
    texts = [value for value in found if isinstance(value, str)]
    assert any(value.startswith(HERE.url) for value in texts)
    assert any(HERE.model in value for value in texts)
    assert any(HERE.key in value for value in texts)
    is_told = HERE.context in found or str(HERE.context) in found
    assert is_told or "no setting for the length" in client.note
    assert not [text for text in [*texts, *filled(client.command, HERE)] if "{" in text]
    assert all(path_of(file).stat().st_mode & 0o077 == 0 for file in client.files)

    assert all(sentence.endswith("has it already.") for sentence in written(client))
    assert not list(Path.home().rglob("*.backup*"))
    written(client, OTHER)
    for file in client.files:
        assert any(OTHER.model in value for value in values(held(file)) if isinstance(value, str))


OWN: dict[str, Any] = {"theirs": {"deep": [1, {"id": "x"}]}, "also": "ü"}


@EACH
def test_what_else_is_in_a_file_stays(name: str) -> None:
    for file in CLIENTS[name].files:
        if isinstance(file.content, list) or file.format != "json":
            continue  # test_client_files.py has them
        client, path = ClientRecord("a client", (file,), ("a",)), path_of(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(before := text_of(OWN, file.format), "utf-8")
        (sentence,) = written(client)
        assert sentence.endswith(f"It was {path.name}.backup before.")
        assert {name: held(file)[name] for name in OWN} == OWN
        assert path.with_name(f"{path.name}.backup").read_text("utf-8") == before


def test_the_versions_are_those_that_are_driven() -> None:
    tested = {name: client.tested for name, client in CLIENTS.items() if client.tested}
    driven = {name: agent.package for name, agent in AGENTS.items()} | {"claude": CLAUDE_CODE}
    assert tested.keys() == driven.keys()
    assert all(driven[name].endswith(version) for name, version in tested.items())


@EACH
def test_what_is_shown_is_all_that_a_client_needs(name: str) -> None:
    text = shown(client := CLIENTS[name], HERE)
    for value in (HERE.url, HERE.model, client.command[0], *(file.place for file in client.files)):
        assert value in text
    assert name in [line.split()[0] for line in listing().splitlines()]


def test_the_document_is_made_from_the_same_records() -> None:
    assert f"-->\n{markdown()}" in README.read_text("utf-8"), (
        "made by `mlx-server connect --markdown`"
    )


@EACH
def test_a_client_starts_once_its_files_are_written_if_it_needs_them(name: str) -> None:
    client = CLIENTS[name]
    if client.starts_without_files:
        command, environment = command_of(name, client, HERE)
        assert environment == filled(client.environment, HERE)
    else:
        with pytest.raises(SettingsError, match="Add --write"):
            command_of(name, client, HERE)
        written(client)
        command, _ = command_of(name, client, HERE)
    assert command[0] == client.command[0]
    (Path.home() / command[0]).unlink()
    with pytest.raises(SettingsError, match=f"install {client.title} first"):
        command_of(name, client, HERE)


@pytest.mark.parametrize("value", ["{model}", "{context}", "{url}{key}", r"\1\g<0>", CONTEXT])
def test_a_value_that_looks_like_a_placeholder_stays_as_it_is(value: str) -> None:
    connection = Connection(url=value, key=value, model=value, context=1)
    assert filled("{url} {key} {model}", connection) == f"{value} {value} {value}"


Answer = tuple[int, Any]
Play = Callable[..., str]

asked: list[tuple[str, str | None]] = []


class Playing(RawServer):
    answers: dict[str, Answer]

    def reply(self, head: str, body: bytes) -> Iterable[bytes]:
        _, path, *_ = head.split()
        asked.append((path, key_of(head)))
        status, value = self.answers.get(path, (404, {"detail": "Not Found"}))
        return (http_answer(value if isinstance(value, str) else json.dumps(value), status),)


@pytest.fixture
def play() -> Iterator[Play]:
    """Starts a server that has these answers to GET, by their paths; returns its URL."""
    asked.clear()
    with ExitStack() as servers:

        def started(answers: dict[str, Answer]) -> str:
            server = servers.enter_context(closing(Playing(tuple)))
            server.answers = answers
            return server.url

        yield started


def test_only_what_is_not_given_is_asked_for(play: Play) -> None:
    for given in (NOWHERE, f"{NOWHERE}/", f"{NOWHERE}/v1", f"{NOWHERE}/v1/"):
        assert connection_to(given, "", "m", 10) == Connection(NOWHERE, NO_KEY, "m", 10)
    sees = {"architecture": {"input_modalities": ["text", "image"]}, "context_length": 4096}
    url = play({"/v1/models": (200, MODELS), "/v1/models/org/m": (200, sees)})
    for model in (None, "org/m"):
        found = connection_to(url, "", model, 7)
        assert found == Connection(url, NO_KEY, "org/m", 7, ("text", "image"))
    found = connection_to(f"{url}/v1", "k", None, None)
    assert found == Connection(url, "k", "org/m", 4096, ("text", "image"))
    settings = filled(CLIENTS["opencode"].files[0].content, found)
    known = settings["provider"]["mlx-server"]["models"]["org/m"]
    assert known["modalities"] == {"input": ["text", "image"], "output": ["text"]}
    both = [("/v1/models", "Bearer k"), ("/v1/models/org/m", "Bearer k")]
    known = ("/v1/models/org/m", None)
    assert asked == [("/v1/models", None), known, known, *both]


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("org/m:pirate", "/v1/models/org/m:pirate"),
        ("a?b#c", "/v1/models/a%3Fb%23c"),
        ("ä b", "/v1/models/%C3%A4%20b"),
    ],
)
def test_a_model_of_any_name_is_asked_for_by_it(play: Play, model: str, path: str) -> None:
    url = play({path: (200, {"context_length": 5})})
    assert connection_to(url, "", model, None).context == 5


@pytest.mark.parametrize("other", ["llama", [], {"input_modalities": "image"}, {}])
def test_a_server_that_names_an_architecture_otherwise_reads_text(play: Play, other: Any) -> None:
    url = play({"/v1/models/m": (200, {"context_length": 5, "architecture": other})})
    assert connection_to(url, "", "m", None) == Connection(url, NO_KEY, "m", 5)


@cases
def test_an_answer_without_the_context_is_an_error_in_a_sentence(
    play: Play, path: str, answer: Answer, said: str
) -> None:
    url = play({f"/v1/models{path}": answer})
    with pytest.raises(ServerError, match=said):
        connection_to(url, "", "m" if path else None, None)


@pytest.mark.parametrize("model", [None, "m"])
def test_where_no_server_listens_it_is_said_how_to_start_one(model: str | None) -> None:
    with pytest.raises(ServerError, match="mlx-server serve"):
        connection_to(NOWHERE, "", model, None)


@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_url_is_not_written_anywhere(url: str) -> None:
    with pytest.raises(SettingsError):
        connection_to(url, "", "m", 100)


# The command: what is shown, written and started. No server is asked.


GIVEN = ("--model", "my-model", "--context-length", "4321", "--url", "http://127.0.0.1:9")
CODEX = ".codex/mlx-server.config.toml"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """The programs that have taken the place of the command."""
    started: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *given: started.append(given))
    return started


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["connect", *arguments])


def test_without_a_client_all_are_listed() -> None:
    assert run().output == listing()
    assert run("--markdown").output == markdown()


def test_an_unknown_client_is_told_the_nearest_ones() -> None:
    error = run("cldue", *GIVEN).exception
    assert isinstance(error, SettingsError)
    assert "no client 'cldue'" in error.message
    assert "claude" in error.message
    assert "`mlx-server connect`" in error.message


def test_lines_are_written_and_each_file_is_named(home: Path, started: Any) -> None:
    written = run("codex", *GIVEN, "--write")
    assert written.exit_code == 0
    assert CODEX in written.output
    assert "codex --profile mlx-server" in written.output
    for given in ("my-model", "4321", "http://127.0.0.1:9/v1"):
        assert given in (home / CODEX).read_text()
    assert started == []
    assert "export COPILOT_MODEL=my-model\n" in run("copilot-cli", *GIVEN, "--write").output


def test_a_client_is_started_with_its_variables_added_to_ours(
    monkeypatch: pytest.MonkeyPatch, started: Any
) -> None:
    monkeypatch.setenv("OURS", "kept")
    monkeypatch.setenv("ANTHROPIC_MODEL", "another")
    run("claude", *GIVEN, "--api-key", "secret", "--run")
    [(program, command, environment)] = started
    assert (program, command) == ("claude", ["claude"])
    expected = {
        "OURS": "kept",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_AUTH_TOKEN": "secret",
        "ANTHROPIC_MODEL": "my-model",
    }
    assert environment.items() >= expected.items()


def test_a_client_that_needs_files_starts_after_they_are_written(started: Any) -> None:
    error = run("codex", *GIVEN, "--run").exception
    assert isinstance(error, SettingsError)
    assert "Add --write" in error.message
    assert started == []
    assert run("codex", *GIVEN, "--write", "--run").exit_code == 0
    assert [program for program, *_ in started] == ["codex"]


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
    assert added("# mine", TOML, "toml") == "# mine\n" + text_of(TOML, "toml")
    assert added("# mine\n", [MODEL], "yaml") == "# mine\n" + text_of([MODEL], "yaml")


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
    before = text_of(TOML, "toml")
    assert added(before, TOML, "toml") == before
    after = added(before, {**TOML, "size": 6}, "toml")
    assert tomllib.loads(after) == {**TOML, "size": 6}


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
    assert "some-model" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_file_that_can_not_be_added_to_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("// mine\n{}")
    with pytest.raises(
        SettingsError, match=r"without losing something[\s\S]*Add this[\s\S]*some-model"
    ):
        changes(record(path), HERE)
    assert [each.name for each in tmp_path.glob("*x.json*")] == ["x.json"]


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
