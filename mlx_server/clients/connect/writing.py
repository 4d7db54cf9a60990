"""Writes a client's files, each with a backup of what was there."""

import errno
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_server.clients.connect.clients import ClientFile, ClientRecord
from mlx_server.clients.connect.formats import CannotMerge, with_content, written
from mlx_server.clients.connect.template import Connection, filled
from mlx_server.errors import SettingsError, public_message
from mlx_server.system.own_files import own_path, write_private
from mlx_server.system.regular_files import read_regular

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
    path = Path(file.path).expanduser()
    content = filled(file.content, connection)
    try:
        before = read_regular(found) if (found := own_path(path)).exists() else None
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


def write(found: list[Change]) -> Iterator[str]:
    """Writes the files that need a change, with backups. Yields a sentence about each file."""
    for change in found:
        if not change.is_needed:
            yield f"{change.path} has it already."
            continue
        try:
            backup = _back_up(change) if change.before is not None else None
            _replace(change)
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


def _replace(change: Change) -> None:
    path = own_path(change.path)  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else PRIVATE
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_private(temporary, change.after)
        temporary.chmod(mode)
        if change.before != (read_regular(path) if path.exists() else None):
            raise OSError(errno.EBUSY, "it was changed meanwhile; try again", str(path))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
