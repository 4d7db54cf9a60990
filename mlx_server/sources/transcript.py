"""Transcripts: the recorded raw output that a replay model plays.

A transcript is a YAML list, as which JSON is read too, or JSON Lines. Every entry holds raw output
as a model writes it, including special tokens. Entries with conditions answer the requests that
meet them; the others answer the remaining requests in order, starting again after the last. Every
mistake in the file is reported with its line and how to fix it.
"""

import difflib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol

import msgspec
import yaml

from mlx_server.errors import AnswerUnwritable, NoRecording, TranscriptBroken, public_message
from mlx_server.events import Answer, folded
from mlx_server.families.base import ModelFamily
from mlx_server.messages import INSTRUCTION_ROLES, Conversation, Message, Tool, ToolCall
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.requests import Infill, Prompt


def write_answer(family: ModelFamily, tokenizer: Tokenizer, answer: Message) -> str:
    """The raw output from which the family's parser reads this reasoning, text and calls. Raises
    AnswerUnwritable if the family has no such output."""
    parts = _parts(answer)
    for output in family.outputs(answer):
        read = _read(family, tokenizer, output, answer.tool_calls)
        if not read.repairs and _parts(read.message()) == parts:
            return output
    raise AnswerUnwritable(_reason(family, answer))


def _parts(answer: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    """The reasoning, the text, and each call's name and parsed arguments."""
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    return (answer.reasoning or "").strip(), answer.content.strip(), calls


def _read(
    family: ModelFamily, tokenizer: Tokenizer, output: str, calls: Sequence[ToolCall]
) -> Answer:
    names = dict.fromkeys(call.name for call in calls)
    offered = tuple(Tool(name, None, _argument_schema(calls, name)) for name in names)
    parser = family.make_parser(ParseContext(tools=offered, control=tokenizer.control_tokens))
    text = tokenizer.detokenizer()
    events = [event for id in tokenizer.encode(output) for event in parser.feed(id, text.feed(id))]
    return folded([*events, *parser.finish(cut=False)])


def _argument_schema(calls: Sequence[ToolCall], name: str) -> dict[str, Any]:
    """A schema for the tool that allows the arguments of all its calls, with which the parser can
    tell their types."""
    values: dict[str, list[Any]] = {}
    for call in calls:
        if call.name == name:
            for key, value in json.loads(call.arguments).items():
                values.setdefault(key, []).append(value)
    return {"type": "object", "properties": {key: {"enum": v} for key, v in values.items()}}


def _reason(family: ModelFamily, answer: Message) -> str:
    what = "this answer as a whole"
    if answer.tool_calls and not family.has_calls:
        what = "calls of tools"
    elif answer.reasoning and not (family.shapes[0] or family.layout_with().reasoning):
        what = "thoughts"
    return (
        f"The family {family.name} has no way to write {what}. Choose another family, or give the "
        "model's raw output."
    )


REGEX = "regex:"
REMINDERS = 8
"""The number of user messages at the end that are compared with entries."""
SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPE = re.compile(r"(?>\\u[0-9a-fA-F]{4})++")
"""Characters as JSON escapes them, such as an emoji in a tool's result."""


@dataclass(frozen=True)
class RequestFacts:
    """The facts about a request that entries are compared with."""

    user: str
    """The last user message."""
    before: tuple[str, ...]
    """Those right before it, the latest first: agents send reminders after a question."""
    last: tuple[str, ...]
    """The latest message; the results of the latest calls, if it is one of them."""
    turn: int
    """1 for the conversation's first answer, 2 for its second."""
    step: int
    """The number of answers since the latest user message, such as calls with their results."""
    system: str
    models: tuple[str, ...]
    """The model's name in the request, and its id."""
    tools: frozenset[str]


def facts_of(prompt: Prompt, models: tuple[str, ...]) -> RequestFacts:
    if not isinstance(prompt, Conversation):
        text = prompt if isinstance(prompt, str) else ""
        if isinstance(prompt, Infill):
            text = prompt.prefix
        return RequestFacts(text, (), (text,), 1, 0, "", models, frozenset())
    messages = prompt.messages
    # an answer at the end is continued, so it is not one of the earlier answers
    earlier = messages[:-1] if messages and messages[-1].role == "assistant" else messages
    asked = max((at for at, m in enumerate(messages) if m.role == "user"), default=-1)
    latest = reversed(messages[max(0, asked + 1 - REMINDERS) : asked + 1])
    users = takewhile(lambda message: message.role == "user", latest)
    user, *before = [message.content for message in users] or [""]
    return RequestFacts(
        user=user,
        before=tuple(before),
        last=tuple(_last(messages)),
        turn=1 + _answers(earlier),
        step=_answers(earlier[asked + 1 :]),
        system="\n".join(m.content for m in messages if m.role in INSTRUCTION_ROLES),
        models=models,
        tools=frozenset(tool.name for tool in prompt.tools),
    )


def _answers(messages: tuple[Message, ...]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _last(messages: tuple[Message, ...]) -> Iterator[str]:
    for at, message in enumerate(reversed(messages)):
        if at and not message.role == "tool" == messages[-1].role:
            return
        yield message.content


class RecordedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    arguments: dict[str, Any] = {}


class RecordedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An answer in words, which each family writes in its own way."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[RecordedCall, ...] = ()

    def message(self) -> Message:
        calls = (
            ToolCall("", call.name, msgspec.json.encode(call.arguments).decode())
            for call in self.calls
        )
        return Message("assistant", self.text, None, self.reasoning or None, tuple(calls))


class TranscriptEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A condition that is text is the entire text, or `regex:` and a pattern to search for."""

    output: str | None = None
    output_token_ids: tuple[int, ...] | None = None
    answer: RecordedAnswer | None = None
    match: str | None = None
    """The last user message; if no entry has that, one right before it."""
    last: str | None = None
    """The last message of any role, such as a tool's result."""
    turn: int | None = None
    """1 for the conversation's first answer, 2 for its second."""
    system: str | None = None
    """The system and developer messages, joined by line breaks."""
    model: str | None = None
    """The model's name in the request, or its id."""
    tools: tuple[str, ...] | None = None
    """Names of tools that the request offers; an empty list: it offers none."""
    finish: Literal["stop", "length"] = "stop"
    """`stop`: a stop token follows the output; `length`: the output was cut off there."""
    off_grammar: Literal["error", "noise"] = "error"
    """The continuation where the request's grammar refuses the recorded token: an error, or any
    tokens that it allows, as from a model that would never write them by itself."""
    delay_ms: float = 0.0
    """The delay before each further token."""
    generation_prompt: str = ""
    """The end of the prompt, for families whose template leaves the model inside a block."""

    def __post_init__(self) -> None:
        if [self.output, self.output_token_ids, self.answer].count(None) != 2:
            raise ValueError("it needs one of `output`, `output_token_ids` and `answer`")
        if self.finish == "length" and not (self.output or self.output_token_ids):
            raise ValueError("with `finish: length` the `output` can't be empty")
        _check_answer(self.answer)
        for name in ("output", "generation_prompt"):
            if SURROGATE.search(getattr(self, name) or ""):
                raise ValueError(f"`{name}` has half a surrogate pair")
        if not 0 <= self.delay_ms <= 60_000:
            raise ValueError("`delay_ms` should be from 0 to 60000")
        if self.turn is not None and self.turn < 1:
            raise ValueError("`turn` should be 1 or more: 1 is the first answer")
        for name in ("match", "last", "system", "model"):
            _check_pattern(name, getattr(self, name))

    @property
    def has_conditions(self) -> bool:
        names = ("match", "last", "turn", "system", "model", "tools")
        return any(getattr(self, name) is not None for name in names)

    @property
    def names_its_place(self) -> bool:
        """Whether it says itself which step of a loop it answers."""
        return self.last is not None or self.turn is not None

    def mismatch(self, facts: RequestFacts) -> str | None:
        """The name of the first condition that the request does not meet."""
        offered = facts.tools
        met = {
            "match": _holds(self.match, facts.user),
            "last": any(_holds(self.last, text) for text in facts.last),
            "turn": self.turn in (None, facts.turn),
            "system": _holds(self.system, facts.system),
            "model": self.model is None or any(_holds(self.model, n) for n in facts.models),
            "tools": self.tools is None
            or (offered.issuperset(self.tools) if self.tools else not offered),
        }
        return next((name for name, is_met in met.items() if not is_met), None)

    def tokens(self, tokenizer: Tokenizer, family: ModelFamily) -> list[int]:
        """Raises AnswerUnwritable."""
        if self.answer is not None:
            return tokenizer.encode(write_answer(family, tokenizer, self.answer.message()))
        if self.output is not None:
            return tokenizer.encode(self.output)
        return list(self.output_token_ids or ())


def _check_answer(answer: RecordedAnswer | None) -> None:
    try:
        written = json.dumps(msgspec.to_builtins(answer), ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError("`answer` has a number that is not finite") from None
    if SURROGATE.search(written):
        raise ValueError("`answer` has half a surrogate pair")


def _check_pattern(name: str, text: str | None) -> None:
    if text is not None and text.startswith(REGEX):
        try:
            re.compile(text.removeprefix(REGEX))
        except re.error as error:
            raise ValueError(f"`{name}` is not a regular expression: {error}") from None


def _holds(expected: str | None, text: str) -> bool:
    if expected is None:
        return True
    if expected.startswith(REGEX):
        pattern = re.compile(expected.removeprefix(REGEX))
        return any(pattern.search(each) for each in dict.fromkeys((text, comparable(text))))
    return expected == text or comparable(expected) == comparable(text)


def comparable(text: str) -> str:
    """The text without white space at its end and without JSON's escapes of characters."""
    return ESCAPE.sub(lambda match: _unescaped(match[0]), text).rstrip()


def _unescaped(escapes: str) -> str:
    units = b"".join(bytes.fromhex(unit) for unit in escapes.split("\\u")[1:])
    return units.decode("utf-16-be", "surrogatepass")


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


class MalformedList(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def read_file(path: Path, vocabulary: int | None = None) -> TranscriptFile:
    """vocabulary: the number of token ids, which those in the file must be below; None: any."""
    try:
        return _checked(path.name, listed(path), vocabulary)
    except MalformedList as error:
        return TranscriptFile(problems=[f"{path.name}:{error.line}: {error}"])


def listed(path: Path) -> list[tuple[int, Any]]:
    """The items of a file that is a YAML list or JSON Lines, as plain data, each with its line.
    Raises MalformedList."""
    items = _json_lines if path.suffix in (".jsonl", ".ndjson") else _yaml_list
    return list(items(_content(path)))


def _checked(name: str, lines: list[tuple[int, Any]], vocabulary: int | None) -> TranscriptFile:
    if not lines:
        raise MalformedList(1, "the transcript has no entries: add one, such as `- output: Hello.`")
    file = TranscriptFile()
    for number, (line, raw) in enumerate(lines, 1):
        try:
            file.entries.append(PlacedEntry(number, line, checked_entry(raw, vocabulary)))
        except ValueError as error:
            file.problems.append(f"{name}:{line}: entry {number}: {error}")
    more = len(file.problems) - SHOWN
    file.problems[SHOWN:] = [f"{name}: {more} more entries are malformed"] if more > 0 else []
    return file


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise MalformedList(1, f"the file is larger than {MAX_BYTES >> 20} MiB: split it")
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise MalformedList(
            1, "there is no such file: correct `source:` in models.yaml, or make the file"
        ) from None
    except OSError as error:
        raise MalformedList(1, f"the file can't be read: {public_message(error)}") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise MalformedList(line, "this is not UTF-8: save the file as UTF-8") from None


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    # splitlines() would also split at characters that a JSON string may contain
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise MalformedList(number, f"this is not JSON: {_of_json(error)}") from None


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
        raise MalformedList(line, f"this is not YAML: {error.problem} ({hint})") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise MalformedList(line, "this has a control character: remove it") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise MalformedList(1, f"this is not YAML: {public_message(error)}") from None


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    raise MalformedList(1, "it should be a list of entries: begin each with `- `")


def checked_entry(raw: Any, vocabulary: int | None) -> TranscriptEntry:
    """vocabulary: see `read_file`. Raises ValueError for data that is no entry."""
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


def _with_pairs_joined(data: Any) -> Any:
    """The data with each escaped surrogate pair as the one character that it stands for: YAML
    reads `"\\ud83d\\ude42"` as two characters."""
    match data:
        case str():
            return joined(data)
        case list():
            return [_with_pairs_joined(item) for item in data]
        case dict():
            return {name: _with_pairs_joined(value) for name, value in data.items()}
    return data


def joined(text: str) -> str:
    return PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)


log = logging.getLogger("mlx_server.replay")

NAMED = 8
"""The number of entries without a match that an error names."""


@dataclass(frozen=True)
class Recording:
    entry: TranscriptEntry
    name: str
    """The entry's name, such as `entry 3 of answers.yaml (line 12)`."""


class Recordings(Protocol):
    """The recordings that a replay model plays."""

    def pick(self, prompt: Prompt, models: tuple[str, ...] = ()) -> Recording:
        """Picks what answers this prompt. Raises NoRecording.

        models: the names under which the request may know the model; its own word first.
        """

    def reset(self) -> None:
        """Begins again."""


class Transcript:
    """The recordings of a file."""

    def __init__(self, file: str, entries: Sequence[PlacedEntry]) -> None:
        self._file = file
        self._conditional = [each for each in entries if each.entry.has_conditions]
        self._in_order = [each for each in entries if not each.entry.has_conditions]
        self._played = 0
        """The number of requests that the entries in order have answered."""
        self._lock = Lock()

    def reset(self) -> None:
        """Begins again with the first of the entries in order."""
        with self._lock:
            self._played = 0

    def pick(self, prompt: Prompt, models: tuple[str, ...] = ()) -> Recording:
        """Picks the entry that answers this prompt, and advances the entries in order.

        models: the names under which the request may know the model. Raises NoRecording.
        """
        facts = facts_of(prompt, models)
        mismatches = [(each, each.entry.mismatch(facts)) for each in self._conditional]
        refused = [(each, why) for each, why in mismatches if why]
        matching = self._matching(facts)
        entry = _of_matching(matching, facts) or self._next_in_order()
        what = f"turn {facts.turn}"
        if entry is None:
            log.warning("no entry of %s answers %s%s", self._file, what, _reasons(refused))
            raise self._nothing(facts, matching, refused, is_chat=isinstance(prompt, Conversation))
        name = f"entry {entry.number} of {self._file} (line {entry.line})"
        others = [pair for pair in refused if pair[0].number < entry.number]
        log.info("%s answers %s%s", name, what, _reasons(others))
        return Recording(entry.entry, name)

    def _matching(self, facts: RequestFacts) -> list[PlacedEntry]:
        for user in (facts.user, *facts.before):
            asked = replace(facts, user=user)
            if entries := [each for each in self._conditional if not each.entry.mismatch(asked)]:
                return entries
        return []

    def _next_in_order(self) -> PlacedEntry | None:
        with self._lock:
            self._played += 1
            return (
                self._in_order[(self._played - 1) % len(self._in_order)] if self._in_order else None
            )

    def _nothing(
        self,
        facts: RequestFacts,
        matching: Sequence[PlacedEntry],
        refused: Sequence[tuple[PlacedEntry, str]],
        *,
        is_chat: bool,
    ) -> NoRecording:
        asked = f"No entry of {self._file} matches {facts.user[:60]!r} (turn {facts.turn})"
        if matching:
            numbers = ", ".join(str(each.number) for each in matching)
            why = f": entry {numbers} has answered earlier in this loop"
            fix = (
                "Add an entry for the next step: one more with the same `match`, or one with `last`"
            )
        else:
            why, fix = _reasons(refused), "Add one with this `match`, or one without conditions"
        return NoRecording(f"{asked}{why}. {fix}.", param="messages" if is_chat else "prompt")


def _of_matching(matching: Sequence[PlacedEntry], facts: RequestFacts) -> PlacedEntry | None:
    """The entry of this step: entries that match alike answer a loop's steps, one after the other.
    Those that name their place themselves go first."""
    placed = [each for each in matching if each.entry.names_its_place]
    steps = [each for each in matching if not each.entry.names_its_place]
    if placed:
        return placed[0]
    return steps[facts.step] if facts.step < len(steps) else None


def _reasons(refused: Sequence[tuple[PlacedEntry, str]]) -> str:
    if not refused:
        return ""
    named = ", ".join(f"entry {each.number} (`{why}`)" for each, why in refused[:NAMED])
    more = len(refused) - NAMED
    return f"; these do not match: {named}{f' and {more} more' if more > 0 else ''}"


def read_transcript(path: Path, vocabulary: int) -> Transcript:
    """Reads a transcript. Raises TranscriptBroken.

    vocabulary: the number of token ids; ids in the file must be below it.
    """
    file = read_file(path, vocabulary)
    if file.problems:
        raise TranscriptBroken(f"The transcript can't be played: {'; '.join(file.problems)}.")
    return Transcript(path.name, file.entries)
