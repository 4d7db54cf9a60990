"""Reads a client's file, and adds to it without changing what else is there."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mlx_server.clients.connect.clients import ClientFile, Format

IDENTITIES = ("id", "model_id", "name")
"""Fields by which two entries of a list are the same one."""


class CannotMerge(Exception):
    """Adding to the file would lose something. The message says what."""


def parsed(text: str, format: Format) -> Any:
    """None for an empty file. Raises CannotMerge."""
    if not text.strip():
        return None
    try:
        match format:
            case "json":
                return json.loads(text)
            case "yaml":
                return yaml.safe_load(text)
            case "toml":
                return tomllib.loads(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        why = str(error).splitlines()[0]
        raise CannotMerge(f"it is not plain {format.upper()} ({why})") from None


def written(content: Any, format: Format) -> str:
    match format:
        case "json":
            return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        case "yaml":
            return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        case "toml":
            return _toml(content)


def with_content(text: str, file: ClientFile, content: Any) -> str:
    """The text of the file with `content` in it; unchanged if it is there. Raises CannotMerge."""
    before = parsed(text, file.format)
    if before is None:
        whole = {**file.defaults, **content} if isinstance(content, Mapping) else content
        return text + written(whole, file.format)
    if not isinstance(before, type(content)):
        raise CannotMerge("it holds something else than this client writes")
    wanted = merged(before, content)
    if isinstance(wanted, dict):
        wanted = {**wanted, **{k: v for k, v in file.defaults.items() if k not in wanted}}
    if wanted == before:
        return text
    match file.format:
        case "json":
            return written(wanted, "json")
        case "yaml":
            return _with_yaml(text, before, wanted)
        case "toml":
            return _with_toml(before, content)


def merged(before: Any, content: Any) -> Any:
    if isinstance(before, dict) and isinstance(content, Mapping):
        added = {
            name: merged(before[name], value) if name in before else value
            for name, value in content.items()
        }
        return {**before, **added}
    if isinstance(before, list) and isinstance(content, Sequence) and not isinstance(content, str):
        return _merged_lists(before, content)
    return content


def _merged_lists(before: list[Any], content: Sequence[Any]) -> list[Any]:
    found = list(before)
    for item in content:
        at = next((i for i, other in enumerate(found) if _is_same(other, item)), None)
        if at is None:
            found.append(item)
        else:
            found[at] = merged(found[at], item)
    return found


def _is_same(one: Any, other: Any) -> bool:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return bool(one == other)
    name = next((name for name in IDENTITIES if name in other), None)
    return name is not None and one.get(name) == other[name]


def _with_yaml(text: str, before: Any, wanted: Any) -> str:
    """What is new at the top is appended; elsewhere the file is written anew, if it has no
    comments, which would be lost."""
    ended = text if text.endswith("\n") else text + "\n"
    added = (
        {name: value for name, value in wanted.items() if name not in before}
        if isinstance(wanted, dict)
        else wanted[len(before) :]
    )
    appended = ended + written(added, "yaml") if added else text
    if parsed(appended, "yaml") == wanted:
        return appended
    if any(line.lstrip().startswith("#") or " #" in line for line in text.splitlines()):
        raise CannotMerge("it has comments, which would be lost")
    return written(wanted, "yaml")


def _with_toml(before: Any, content: Any) -> str:
    if not _holds_only(before, content):
        raise CannotMerge("it has tables of its own, or others of these names")
    return written(content, "toml")


def _holds_only(before: Any, content: Any) -> bool:
    if isinstance(before, dict) and isinstance(content, Mapping):
        return all(name in content and _holds_only(before[name], content[name]) for name in before)
    return not isinstance(before, dict)


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
