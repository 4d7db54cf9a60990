"""Transcripts: the recorded raw output that a replay model plays.

A transcript is a YAML or JSON list, or JSON Lines. Every entry holds raw output as a model writes
it, including special tokens. Entries with a `match` answer the requests that they match; the
others answer the remaining requests in order, starting again after the last.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.errors import BadRequest, ModelUnusable, public_message
from mlx_server.messages import Conversation
from mlx_server.requests import Prompt

MAX_BYTES = 64 << 20
REGEX = "regex:"
SURROGATE = re.compile("[\ud800-\udfff]")


class TranscriptEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    output: str | None = None
    output_token_ids: tuple[int, ...] | None = None
    match: str | None = None
    """The entire last user message, or `regex:` and a pattern to search for in it."""
    finish: Literal["stop", "length"] = "stop"
    """`stop`: a stop token follows the output; `length`: the output was cut off there."""
    delay_ms: float = 0.0
    """The delay before each further token."""
    generation_prompt: str = ""
    """The end of the prompt, for families whose template leaves the model inside a block."""

    def __post_init__(self) -> None:
        if (self.output is None) == (self.output_token_ids is None):
            raise ValueError("it needs either `output` or `output_token_ids`")
        if self.finish == "length" and not (self.output or self.output_token_ids):
            raise ValueError("with `finish: length` the `output` can't be empty")
        for name in ("output", "generation_prompt"):
            if SURROGATE.search(getattr(self, name) or ""):
                raise ValueError(f"`{name}` has half a surrogate pair")
        if not 0 <= self.delay_ms <= 60_000:
            raise ValueError("`delay_ms` should be from 0 to 60000")
        if self.match is not None and self.match.startswith(REGEX):
            try:
                re.compile(self.match.removeprefix(REGEX))
            except re.error as error:
                raise ValueError(f"`match` is not a regular expression: {error}") from None

    def answers(self, text: str) -> bool:
        if self.match is None:
            return False
        if self.match.startswith(REGEX):
            return re.search(self.match.removeprefix(REGEX), text) is not None
        return self.match == text

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        if self.output is not None:
            return tokenizer.encode(self.output)
        return list(self.output_token_ids or ())


class Transcript:
    def __init__(self, entries: list[TranscriptEntry]) -> None:
        self._matching = [entry for entry in entries if entry.match is not None]
        in_order = [entry for entry in entries if entry.match is None]
        self._in_order: Iterator[TranscriptEntry] = itertools.cycle(in_order)

    def pick(self, prompt: Prompt) -> TranscriptEntry:
        """Picks the entry that answers this prompt, and advances the entries without a match."""
        text = _last_user_text(prompt)
        found = next((entry for entry in self._matching if entry.answers(text)), None)
        found = found or next(self._in_order, None)
        if found is None:
            raise BadRequest(
                f"No entry of the transcript matches {text[:60]!r}. Add one with this `match`, or "
                "one without a `match`.",
                param="messages" if isinstance(prompt, Conversation) else "prompt",
            )
        return found


def read_transcript(path: Path, vocabulary: int) -> Transcript:
    """Reads a transcript. Raises ModelUnusable.

    vocabulary: the number of token ids; ids in the file must be below it.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelUnusable(
                f"The transcript {path.name} is larger than {MAX_BYTES >> 20} MiB. Split it."
            )
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnusable(
            f"The transcript {path.name} can't be read: {public_message(error)}."
        ) from None
    try:
        entries = [
            _entry(number, raw, vocabulary) for number, raw in enumerate(_parsed(path, text), 1)
        ]
        if not entries:
            raise ValueError("it has no entries")
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ModelUnusable(f"The transcript {path.name} is not well-formed: {error}.") from None
    return Transcript(entries)


def _entry(number: int, raw: Any, vocabulary: int) -> TranscriptEntry:
    try:
        entry = msgspec.convert(raw, TranscriptEntry)
        unknown = [id for id in entry.output_token_ids or () if not 0 <= id < vocabulary]
        if unknown:
            raise ValueError(
                f"`output_token_ids` has {unknown[0]}, but the vocabulary has {vocabulary} tokens"
            )
    except ValueError as error:
        raise ValueError(f"entry {number}: {error}") from None
    return entry


def _parsed(path: Path, text: str) -> list[Any]:
    if path.suffix in (".jsonl", ".ndjson"):
        # splitlines() would also split at characters that a JSON string may contain
        lines = [line for line in text.split("\n") if line.strip()]
        return [_line(number, line) for number, line in enumerate(lines, 1)]
    # JSON is not read as YAML, which makes two characters of an escaped surrogate pair
    found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(found, list | None):
        raise ValueError("it should be a list of entries")
    return found or []


def _line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"entry {number}: {error}") from None


def _last_user_text(prompt: Prompt) -> str:
    match prompt:
        case Conversation(messages):
            return next((m.content for m in reversed(messages) if m.role == "user"), "")
        case str():
            return prompt
    return ""
