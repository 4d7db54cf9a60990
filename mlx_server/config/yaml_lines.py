"""YAML with the line of every key, so that messages can name the line of a mistake.

ruamel.yaml knows these lines too, but stops at the first duplicate key, expands aliases, takes 2.5
times as long, and by YAML 1.2 reads `yes` as text.
"""

from dataclasses import dataclass, field
from pathlib import Path

import yaml

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_NUMBER_LENGTH = 100

Loc = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class YamlProblem:
    line: int
    """0 if the problem is the whole file."""
    where: str
    """The path in the file, such as `models.NAME.source`; empty if the file could not be parsed."""
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class InvalidYaml(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.problem = YamlProblem(line, "", message)


class _Loader(yaml.SafeLoader):
    """Refuses aliases, tags and deep nesting, which only hostile files need."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1  # type: ignore[union-attr]
        if isinstance(event, yaml.AliasEvent):
            raise InvalidYaml(line, "YAML aliases (*name) are not supported: repeat the value")
        if getattr(event, "tag", None) is not None:
            raise InvalidYaml(line, "YAML tags (!name) are not supported: put the text in quotes")
        if self.depth == MAX_DEPTH:
            raise InvalidYaml(line, "is nested too deeply")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


@dataclass
class YamlDocument:
    """YAML nodes as plain data, with the line of every key and item."""

    loader: _Loader
    lines: dict[Loc, int] = field(default_factory=dict)
    problems: list[YamlProblem] = field(default_factory=list)

    def plain(self, node: yaml.Node, loc: Loc = ()) -> object:
        self.lines.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.plain(item, (*loc, i)) for i, item in enumerate(node.value))
        is_text = node.tag == "tag:yaml.org,2002:str"
        try:
            if not is_text and len(node.value) > MAX_NUMBER_LENGTH:
                raise ValueError
            return self.loader.construct_object(node)
        except (ValueError, yaml.YAMLError):
            message = "can't be read: put text that looks like a number or a date in quotes"
            self.problems.append(YamlProblem(self.lines[loc], where(loc), message))
            return node.value

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, object]:
        data: dict[str, object] = {}
        for key, value in node.value:
            line, inner = key.start_mark.line + 1, (*loc, key.value)
            if key.tag != "tag:yaml.org,2002:str":
                self.problems.append(YamlProblem(line, where(loc), "a key is not text: quote it"))
            elif key.value in data:
                message = f"duplicate key, first on line {self.lines[inner]}"
                self.problems.append(YamlProblem(line, where(inner), message))
            else:
                self.lines[inner] = line
                data[key.value] = self.plain(value, inner)
        return data

    def line(self, loc: Loc) -> int:
        return next(self.lines[loc[:n]] for n in range(len(loc), -1, -1) if loc[:n] in self.lines)


def where(loc: Loc) -> str:
    """The path of a key as text. It ends at `api_keys`, since all below may be a secret."""
    if "api_keys" in loc:
        loc = loc[: loc.index("api_keys") + 1]
    parts = (f"[{part}]" if isinstance(part, int) else f".{short(part)}" for part in loc)
    return "".join(parts).removeprefix(".")


def short(name: str) -> str:
    return name if name.isprintable() and 0 < len(name) <= 60 else f"{name[:60]!r}"


def _file_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise InvalidYaml(0, f"is larger than {MAX_FILE_BYTES >> 20} MiB")
        return raw.decode()
    except OSError as error:
        raise InvalidYaml(0, f"can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidYaml(raw.count(b"\n", 0, error.start) + 1, "is not UTF-8") from error


def compose(path: Path) -> tuple[YamlDocument, object]:
    """The lines of the file, and its content as plain data. Raises InvalidYaml."""
    text = _file_text(path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidYaml(line, "has a control character: remove it") from error
    except yaml.MarkedYAMLError as error:
        raise _in_yaml(error) from error
    document = YamlDocument(loader)
    return document, document.plain(node) if node else {}


ADVICE = {
    "'\\t'": "indent with spaces",
    "expected ':'": "write `key: value`",
    "mapping values": "write `key: value`, and quote a text that contains `: `",
    "found '<block": "indent the keys of one mapping equally",
}
"""What to do about a problem, by a part of its text."""


def _in_yaml(error: yaml.MarkedYAMLError) -> InvalidYaml:
    message = f"YAML: {error.problem}"
    message += next((f": {advice}" for sign, advice in ADVICE.items() if sign in message), "")
    if error.context and error.context_mark:
        message += f" ({error.context}, line {error.context_mark.line + 1})"
    mark = error.problem_mark or error.context_mark
    return InvalidYaml(mark.line + 1 if mark else 0, message)
