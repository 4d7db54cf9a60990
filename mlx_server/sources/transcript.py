"""Transcripts: the recorded raw output that a replay model plays.

A transcript is a YAML or JSON list, or JSON Lines. Every entry holds raw output as a model writes
it, including special tokens. Entries with conditions answer the requests that meet them; the others
answer the remaining requests in order, starting again after the last.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from mlx_server.errors import NoRecording, TranscriptBroken
from mlx_server.messages import Conversation
from mlx_server.requests import Prompt
from mlx_server.sources.transcript_entry import RequestFacts, TranscriptEntry, facts_of
from mlx_server.sources.transcript_file import PlacedEntry, read_file

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
        matching = [each for each, mismatch in mismatches if mismatch is None]
        refused = [(each, why) for each, why in mismatches if why]
        found = _of_matching(matching, facts) or self._next_in_order()
        what = f"turn {facts.turn}"
        if found is None:
            log.warning("no entry of %s answers %s%s", self._file, what, _reasons(refused))
            raise self._nothing(facts, matching, refused, is_chat=isinstance(prompt, Conversation))
        name = f"entry {found.number} of {self._file} (line {found.line})"
        others = [pair for pair in refused if pair[0].number < found.number]
        log.info("%s answers %s%s", name, what, _reasons(others))
        return Recording(found.entry, name)

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
