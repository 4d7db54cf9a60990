"""Reads the file of a transcript; every mistake is reported with its line and how to fix it."""

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from mlx_server.errors import public_message
from mlx_server.sources.transcript_entry import TranscriptEntry

MAX_BYTES = 64 << 20
SHOWN = 10
"""The number of a file's mistakes that are reported."""

PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
TEXTS = {"output", "match", "last", "system", "model", "generation_prompt"}


@dataclass(frozen=True)
class PlacedEntry:
    """An entry with its number in the file, from 1, and the line where it begins."""

    number: int
    line: int
    entry: TranscriptEntry


@dataclass(frozen=True)
class TranscriptFile:
    entries: list[PlacedEntry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Each with the file's name and the line, such as `answers.yaml:7: entry 2: ...`."""


class _Malformed(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def read_file(path: Path, vocabulary: int | None = None) -> TranscriptFile:
    """vocabulary: the number of token ids, which those in the file must be below; None: any."""
    try:
        return _checked(path.name, list(_placed(path, _content(path))), vocabulary)
    except _Malformed as error:
        return TranscriptFile(problems=[f"{path.name}:{error.line}: {error}"])


def _checked(name: str, found: list[tuple[int, Any]], vocabulary: int | None) -> TranscriptFile:
    if not found:
        raise _Malformed(1, "the transcript has no entries: add one, such as `- output: Hello.`")
    file = TranscriptFile()
    for number, (line, raw) in enumerate(found, 1):
        try:
            file.entries.append(PlacedEntry(number, line, _entry(raw, vocabulary)))
        except ValueError as error:
            file.problems.append(f"{name}:{line}: entry {number}: {error}")
    more = len(file.problems) - SHOWN
    file.problems[SHOWN:] = [f"{name}: {more} more entries are malformed"] if more > 0 else []
    return file


def _content(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _Malformed(1, f"the file is larger than {MAX_BYTES >> 20} MiB: split it")
        raw = path.read_bytes()
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise _Malformed(
            1, "there is no such file: correct `source:` in models.yaml, or make the file"
        ) from None
    except OSError as error:
        raise _Malformed(1, f"the file can't be read: {public_message(error)}") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _Malformed(line, "this is not UTF-8: save the file as UTF-8") from None


def _placed(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Each entry as plain data, with its line."""
    if path.suffix in (".jsonl", ".ndjson"):
        yield from _json_lines(text)
    elif path.suffix == ".json":
        yield from _json_list(text)
    else:
        yield from _yaml_list(text)


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    # splitlines() would also split at characters that a JSON string may contain
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _Malformed(number, f"this is not JSON: {_of_json(error)}") from None


def _json_list(text: str) -> Iterator[tuple[int, Any]]:
    try:
        whole = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        raise _Malformed(error.lineno, f"this is not JSON: {_of_json(error)}") from None
    except RecursionError as error:
        raise _Malformed(1, f"this is not JSON: {_of_json(error)}") from None
    at = text.find("[") + 1
    decoder = json.JSONDecoder()
    for item in _listed(whole):
        at = _past(text, at)
        yield text.count("\n", 0, at) + 1, item
        _, at = decoder.raw_decode(text, at)


def _past(text: str, at: int) -> int:
    """The place of the next item, past white space and a comma."""
    while text[at] in " \t\r\n,":
        at += 1
    return at


def _of_json(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deeply"


def _yaml_list(text: str) -> Iterator[tuple[int, Any]]:
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.SequenceNode):
            yield from (
                (1, item) for item in _listed(loader.construct_document(node) if node else [])
            )
            return
        for item in node.value:
            yield item.start_mark.line + 1, loader.construct_document(item)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        hint = "text with `: `, `#`, quotes or brackets is safest after `|-`, indented on new lines"
        raise _Malformed(line, f"this is not YAML: {error.problem} ({hint})") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _Malformed(line, "this has a control character: remove it") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise _Malformed(1, f"this is not YAML: {public_message(error)}") from None


def _listed(found: Any) -> list[Any]:
    if found is None:
        return []
    if isinstance(found, list):
        return found
    raise _Malformed(1, "the transcript should be a list of entries: begin each with `- `")


def _entry(raw: Any, vocabulary: int | None) -> TranscriptEntry:
    if not isinstance(raw, dict):
        raise ValueError("it should be an object with at least an `output`")
    for name, value in raw.items():
        _check_field(name, value)
    try:
        entry = msgspec.convert(_with_pairs_joined(raw), TranscriptEntry)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(str(error))) from None
    for id in entry.output_token_ids or ():
        if id < 0 or (vocabulary is not None and id >= vocabulary):
            raise ValueError(
                f"`output_token_ids` has {id}; the ids of this vocabulary go from 0 to "
                f"{'its end' if vocabulary is None else vocabulary - 1}"
            )
    return entry


def _check_field(name: Any, value: Any) -> None:
    known = TranscriptEntry.__struct_fields__
    if name not in known:
        nearest = difflib.get_close_matches(str(name), known, n=1)
        meant = f"did you mean `{nearest[0]}`?" if nearest else f"known are {', '.join(known)}"
        raise ValueError(f"unknown key `{str(name)[:60]}`: {meant}")
    if name in TEXTS and not isinstance(value, str | None):
        raise ValueError(f"`{name}` should be text: put it in quotes, or after `|-`")


def _in_words(message: str) -> str:
    """msgspec's message, with its path as the name of the key."""
    what, _, path = message.partition(" - at ")
    name = path.strip("`").removeprefix("$.")
    return f"`{name}`: {what[:1].lower()}{what[1:]}" if name else message


def _with_pairs_joined(found: Any) -> Any:
    """The data with each escaped surrogate pair as the one character that it stands for: YAML
    reads `"\\ud83d\\ude42"` as two characters."""
    match found:
        case str():
            return joined(found)
        case list():
            return [_with_pairs_joined(item) for item in found]
        case dict():
            return {name: _with_pairs_joined(value) for name, value in found.items()}
    return found


def joined(text: str) -> str:
    return PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
