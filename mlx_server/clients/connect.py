"""`mlx-server connect`: makes other makers' clients use this server, by the settings of each.

`connect.yaml` has the clients. What they need is merged into their files, with a backup of what was
there.
"""

import errno
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import httpx
import msgspec
import yaml

from mlx_server.clients.chat import checked_url, client_of, first_model, model_facts
from mlx_server.errors import BadRequest, ServerError, SettingsError, public_message
from mlx_server.system.files import own_path, read_regular, replace_file, write_private

CONTEXT, OUTPUT = "{context as a number}", "{output as a number}"
"""Placeholders that a number replaces, where `{context}` would give a string of its digits."""

INPUTS = "{inputs as a list}"

PLACEHOLDER = re.compile(r"\{(?:url|key|model|context)\}")

ANSWER_SHARE = 4
"""An answer may take one part in this many of the context. Clients compact a conversation before it
fills the rest."""


@dataclass(frozen=True)
class Connection:
    """The values of one server in a client's settings."""

    url: str
    """The base URL without `/v1`."""
    key: str
    model: str
    context: int
    """The model's context length in tokens."""
    inputs: tuple[str, ...] = ("text",)
    """What the model reads: some clients send no picture to others than those that see."""


def filled(template: Any, connection: Connection) -> Any:
    if isinstance(template, Mapping):
        return {
            filled(name, connection): filled(value, connection) for name, value in template.items()
        }
    if isinstance(template, list | tuple):
        return [filled(value, connection) for value in template]
    if template in (CONTEXT, OUTPUT):
        return connection.context // (1 if template == CONTEXT else ANSWER_SHARE)
    if template == INPUTS:
        return list(connection.inputs)
    if not isinstance(template, str):
        return template
    values = {
        "{url}": connection.url,
        "{key}": connection.key,
        "{model}": connection.model,
        "{context}": str(connection.context),
    }
    # in one pass: a value may contain a placeholder's text
    return PLACEHOLDER.sub(lambda found: values[found[0]], template)


Format = Literal["json", "yaml", "toml"]


@dataclass(frozen=True)
class ClientFile:
    path: str
    format: Format
    content: Any
    defaults: dict[str, Any] = field(default_factory=dict)
    """Keys that the file must have. They are added where they are missing; a value that the user
    has set stays."""
    path_on_macos: str = ""
    """Where it is on a Mac, if that is another place."""

    @property
    def place(self) -> str:
        return self.path_on_macos if sys.platform == "darwin" and self.path_on_macos else self.path


@dataclass(frozen=True)
class ClientRecord:
    title: str
    files: tuple[ClientFile, ...]
    command: tuple[str, ...]
    """The command that starts the client, after its `files` are written."""
    environment: dict[str, str] = field(default_factory=dict)
    starts_without_files: bool = False
    """Whether the client can be started with `environment` alone, without its `files`."""
    note: str = ""
    tested: str = ""
    """The client's version that `scripts/conformance` runs; empty if it does not run it."""

    @property
    def places(self) -> list[str]:
        return [file.place for file in self.files]


IDENTITIES = ("id", "model_id", "name", "model")
"""Fields that identify an entry of a list: an entry with the same value is updated, not added."""


COMMENT = re.compile(r"^\s*#|\s#", re.MULTILINE)
"""Matches where a comment of YAML or TOML may begin. It also matches a `#` within a string; such a
file is refused although it could be rewritten, which is the safe side."""


class CannotMerge(Exception):
    """The file can't be added to without losing something of it. The message says why."""


def parsed(text: str, format: Format) -> Any:
    """The file's value; None if it has none. Raises CannotMerge for invalid or ambiguous text, for
    example an object with a key twice."""
    if not text.strip():
        return None
    try:
        match format:
            case "json":
                return json.loads(text, object_pairs_hook=_without_duplicates)
            case "yaml":
                return yaml.safe_load(text)
            case "toml":
                return tomllib.loads(text) or None
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        why = str(error).splitlines()[0]
        raise CannotMerge(f"it is not plain {format.upper()} ({why})") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return members


def written(content: Any, format: Format) -> str:
    match format:
        case "json":
            return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        case "yaml":
            return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        case "toml":
            return _toml(content)


def with_content(text: str, file: ClientFile, content: Any) -> str:
    """The file's text with `content` in it; the same text if all of it is there already. Only JSON
    is merged: YAML and TOML with settings or comments of the user's own are not written again.

    Raises CannotMerge if something of the text would be lost.
    """
    before = parsed(text, file.format)
    own = before if isinstance(before, dict) else {}
    if isinstance(content, Mapping):
        content = {**{k: own.get(k, v) for k, v in file.defaults.items()}, **content}
    if before is None:
        return text + ("\n" if text and text[-1] != "\n" else "") + written(content, file.format)
    if not isinstance(before, type(content)):
        raise CannotMerge("it holds something else than this client writes")
    wanted = merged(before, content)
    if wanted == before:
        return text
    if file.format != "json" and (wanted != content or COMMENT.search(text)):
        raise CannotMerge("it has settings or comments of its own")
    return written(wanted, file.format)


def merged(before: Any, content: Any) -> Any:
    if isinstance(before, dict) and isinstance(content, Mapping):
        added = {
            name: merged(before[name], value) if name in before else value
            for name, value in content.items()
        }
        return {**before, **added}
    if isinstance(before, list) and isinstance(content, Sequence) and not isinstance(content, str):
        return _merged_lists(before, content)
    if isinstance(before, dict | list) and before:
        raise CannotMerge("it holds several values where this client writes something else")
    return content


def _merged_lists(before: list[Any], content: Sequence[Any]) -> list[Any]:
    items = list(before)
    for item in content:
        at = next((i for i, other in enumerate(items) if _is_same(other, item)), None)
        if at is None:
            items.append(item)
        else:
            items[at] = merged(items[at], item)
    return items


def _is_same(one: Any, other: Any) -> bool:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return bool(one == other)
    name = next((name for name in IDENTITIES if name in other), None)
    return name is not None and one.get(name) == other[name]


def _toml(content: Mapping[str, Any], path: str = "") -> str:
    values = {name: value for name, value in content.items() if not isinstance(value, Mapping)}
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()
    ]
    head = [f"\n[{path}]\n"] if path and values else []
    tables = (
        _toml(value, f"{path}.{name}" if path else name)
        for name, value in content.items()
        if isinstance(value, Mapping)
    )
    return "".join([*head, *lines, *tables])


PRIVATE = 0o600
"""The mode of new files, since they hold a key."""


@dataclass(frozen=True)
class Change:
    path: Path
    before: bytes | None
    """The file's content; None if there is no file."""
    after: bytes

    @property
    def is_needed(self) -> bool:
        return self.before != self.after


def lines_of(file: ClientFile, connection: Connection) -> str:
    """The content of a file that has only this client's settings."""
    return with_content("", file, filled(file.content, connection))


def changes(client: ClientRecord, connection: Connection) -> list[Change]:
    """The changes to the client's files, none of which is written yet.

    Raises SettingsError if one of the files can't be added to without losing something.
    """
    return [_change(file, connection) for file in client.files]


def _change(file: ClientFile, connection: Connection) -> Change:
    path = Path(file.place).expanduser()
    content = filled(file.content, connection)
    try:
        before = read_regular(place) if (place := own_path(path)).exists() else None
        after = with_content((before or b"").decode(), file, content).encode()
        return Change(path, before, after)
    except CannotMerge as error:
        raise SettingsError(
            f"{path} can't be changed without losing something: {error}. Add this yourself:\n\n"
            f"{written(content, file.format)}"
        ) from None
    except UnicodeEncodeError:
        raise SettingsError(f"{path} has half of a surrogate pair, which can't be kept.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} can't be read: {public_message(error)}") from None


def write(changes: list[Change]) -> Iterator[str]:
    """Writes the files that need a change, with backups. Yields a sentence about each file."""
    for change in changes:
        if not change.is_needed:
            yield f"{change.path} has it already."
            continue
        try:
            backup = _back_up(change) if change.before is not None else None
            path = own_path(change.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = path.stat().st_mode & 0o777 if path.exists() else PRIVATE
            if change.before != (read_regular(path) if path.exists() else None):
                raise OSError(errno.EBUSY, "it was changed meanwhile; try again", str(path))
            replace_file(path, change.after, mode)
        except OSError as error:
            raise SettingsError(
                f"{change.path} can't be written: {public_message(error)}"
            ) from None
        yield f"{change.path} is written." + (f" It was {backup.name} before." if backup else "")


def _back_up(change: Change) -> Path:
    """Copies the old file next to itself, under a name that is not in use."""
    assert change.before is not None
    number = 0
    while True:
        name = change.path.name + ".backup" + (f"-{number}" if number else "")
        path = change.path.with_name(name)
        if not path.exists():
            write_private(path, change.before)
            return path
        number += 1


CLIENTS: Mapping[str, ClientRecord] = MappingProxyType(
    msgspec.convert(
        yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")),
        dict[str, ClientRecord],
    )
)

NO_KEY = "none"
"""The key in the settings for a server that needs none, since most clients refuse an empty key."""

NO_FILE = "none"


def connection_to(url: str, key: str, model: str | None, context: int | None) -> Connection:
    """The connection for a client's settings. What is not given is requested from the server; a
    model whose context length is given need not be known there.

    Raises ServerError if `url` is no URL, if no server answers, or if it does not know the model or
    its context length.
    """
    base = url.rstrip("/").removesuffix("/v1")
    checked_url(base)
    facts: Mapping[str, Any] = {}
    with client_of(base, key) as client:
        model = model or first_model(client)
        with suppress(*[ServerError] if context else []):
            facts = _facts(client, model)
    known = facts.get("architecture")
    inputs = known.get("input_modalities") if isinstance(known, dict) else None
    named = tuple(map(str, inputs)) if inputs and isinstance(inputs, list) else ("text",)
    return Connection(base, key or NO_KEY, model, context or _context_of(facts, model), named)


def _facts(client: httpx.Client, model: str) -> Mapping[str, Any]:
    try:
        return model_facts(client, model)
    except BadRequest as error:
        raise SettingsError(error.message) from None


def _context_of(facts: Mapping[str, Any], model: str) -> int:
    context = facts.get("context_length")
    if type(context) is not int:
        raise SettingsError(
            f"That server does not know yet how long the context of {model} is. Set it with "
            "--context-length, or send the model a request first."
        )
    return context


def listing() -> str:
    width = max(map(len, CLIENTS))
    lines = (
        f"{name:{width}}  {', '.join(each.places) or NO_FILE}\n" for name, each in CLIENTS.items()
    )
    return "".join(lines)


def shown(client: ClientRecord, connection: Connection) -> str:
    files = [f"# {file.place}\n{lines_of(file, connection)}" for file in client.files]
    environment = client.starts_without_files and client.files
    lines = _environment(client, connection, "or, for one session") if environment else []
    return "\n".join([*files, *lines, after_writing(client, connection)])


def after_writing(client: ClientRecord, connection: Connection) -> str:
    """What is left to do when the client's files are written."""
    return "\n".join(_steps(client, connection)) + "\n"


def _steps(client: ClientRecord, connection: Connection) -> Iterator[str]:
    if not (client.starts_without_files and client.files):
        yield from _environment(client, connection, "in the environment")
    yield f"# then\n{shlex.join(filled(client.command, connection))}"
    if client.note:
        yield f"# {filled(client.note, connection)}"


def _environment(client: ClientRecord, connection: Connection, title: str) -> Iterator[str]:
    if environment := filled(client.environment, connection):
        exports = (f"export {k}={shlex.quote(v)}" for k, v in environment.items())
        yield "\n".join([f"# {title}", *exports])


def markdown() -> str:
    """The table of clients, which clients/README.md contains."""
    rows = [
        f"| {each.title} | `mlx-server connect {name}` | "
        f"{', '.join(f'`{place}`' for place in each.places) or NO_FILE} | "
        f"{each.tested or 'not driven'} |\n"
        for name, each in CLIENTS.items()
    ]
    return "".join(["| Client | Command | Files | Tested version |\n|---|---|---|---|\n", *rows])


def command_of(
    name: str, client: ClientRecord, connection: Connection
) -> tuple[list[str], Mapping[str, str]]:
    """The command that starts the client, and the environment variables to add for it.

    Raises SettingsError if the client is not installed or needs files that are not written yet.
    """
    if not client.starts_without_files:
        missing = [each.path for each in changes(client, connection) if each.is_needed]
        if missing:
            raise SettingsError(
                f"{client.title} reads {', '.join(map(str, missing))}, which lacks these lines. "
                f"Add --write, or see them with `mlx-server connect {name}`."
            )
    command = filled(client.command, connection)
    if shutil.which(command[0]) is None:
        raise SettingsError(f"There is no command `{command[0]}`: install {client.title} first.")
    return command, filled(client.environment, connection)
