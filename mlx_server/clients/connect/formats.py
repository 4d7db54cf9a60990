"""Reads a client's settings file and adds this server to it, without changing the user's values."""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from mlx_server.clients.connect.clients import ClientFile, Format

IDENTITIES = ("id", "model_id", "name")
"""Fields that identify an entry of a list: an entry with the same value is updated, not added."""


COMMENT = re.compile(r"^\s*#|\s#", re.MULTILINE)
"""Matches where a comment of YAML or TOML may begin. It also matches a `#` within a string; such a
file is refused although it could be rewritten, which is the safe side."""


class CannotMerge(Exception):
    """The file can't be added to without losing something of it. The message says why."""


def parsed(text: str, format: Format) -> Any:
    """The file's value; None for an empty file. Raises CannotMerge for invalid or ambiguous text,
    for example an object with a key twice."""
    if not text.strip():
        return None
    try:
        match format:
            case "json":
                return json.loads(
                    text,
                    object_pairs_hook=_without_duplicates,
                    parse_constant=_refuse_constant,
                    parse_float=_finite_float,
                )
            case "yaml":
                return _yaml(text)
            case "toml":
                return tomllib.loads(text)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        why = str(error).splitlines()[0]
        raise CannotMerge(f"it is not plain {format.upper()} ({why})") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _refuse_constant(literal: str) -> Any:
    raise ValueError(f"{literal} is not a JSON number")


def _finite_float(literal: str) -> float:
    if math.isinf(number := float(literal)):
        raise ValueError(f"the number {literal[:20]} is too large")
    return number


def _yaml(text: str) -> Any:
    for node in _nodes(yaml.compose(text, yaml.SafeLoader)):
        if isinstance(node, yaml.MappingNode):
            keys = [str(key.value) for key, _ in node.value]
            if len(set(keys)) < len(keys):
                raise ValueError("a key occurs twice in one mapping")
    return yaml.safe_load(text)


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """Every node of the document, once each: through aliases a node may contain itself."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for inner in node.value if isinstance(node.value, list) else ():
            waiting += inner if isinstance(inner, tuple) else [inner]


def written(content: Any, format: Format) -> str:
    match format:
        case "json":
            return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        case "yaml":
            return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        case "toml":
            return _toml(content)


def with_content(text: str, file: ClientFile, content: Any) -> str:
    """The file's text with `content` merged into it; the same text if all of it is there already.

    Raises CannotMerge if something of the text would be lost.
    """
    before = parsed(text, file.format)
    if before is None:
        whole = {**file.defaults, **content} if isinstance(content, Mapping) else content
        return text + written(whole, file.format)
    if not isinstance(before, type(content)):
        raise CannotMerge("it holds something else than this client writes")
    if isinstance(content, Mapping):
        content = {**{k: v for k, v in file.defaults.items() if k not in before}, **content}
    wanted = merged(before, content)
    if wanted == before:
        return text
    match file.format:
        case "json":
            return written(wanted, "json")
        case "yaml":
            return _with_yaml(text, before, wanted, content)
        case "toml":
            return _with_toml(text, before, content)


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


def _with_yaml(text: str, before: Any, wanted: Any, content: Any) -> str:
    """Appends to the text if only keys of the top level are new. Any other change rewrites the
    file. Raises CannotMerge where rewriting would lose comments or respell a value."""
    ended = text if text.endswith("\n") else text + "\n"
    added = (
        {name: value for name, value in wanted.items() if name not in before}
        if isinstance(wanted, dict)
        else wanted[len(before) :]
    )
    appended = ended + written(added, "yaml") if added else text
    if parsed(appended, "yaml") == wanted:
        return appended
    if COMMENT.search(text):
        raise CannotMerge("it has comments, which would be lost")
    anew = written(wanted, "yaml")
    if _spelled(anew) != merged(_spelled(text), _spelled(written(content, "yaml"))):
        raise CannotMerge("it has values that would be spelled differently")
    return anew


def _spelled(text: str) -> Any:
    """YAML whose scalars stay strings as they are spelled: parsers differ on whether `on` is a
    boolean and `12:30` a number."""
    return yaml.load(text, yaml.BaseLoader)  # noqa: S506, BaseLoader constructs only strings


def _with_toml(text: str, before: Any, content: Any) -> str:
    if not before:  # the file has nothing but comments
        return (text if text.endswith("\n") else text + "\n") + written(content, "toml")
    if not _holds_only(before, content):
        raise CannotMerge("it has tables of its own, or others of these names")
    if COMMENT.search(text):
        raise CannotMerge("it has comments, which would be lost")
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
