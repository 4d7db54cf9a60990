"""Turns an upstream's response, or two for one answer, into the answer's events."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.events import (
    Answer,
    CallSoFar,
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Repaired,
    RepairKind,
    TextDelta,
    TokenCounts,
    TokenLogprob,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
    folded,
    renumbered,
    total,
)
from mlx_server.families.base import ModelFamily
from mlx_server.json_bounds import ExceedsBounds, json_or_none
from mlx_server.loops import TextLoopDetector
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import ParseContext, Parser, TextParser
from mlx_server.parsers.text_pieces import OutputProcessor
from mlx_server.requests import RepairPolicy
from mlx_server.tool_parsers.calls import ToolCallEmitter, new_id
from mlx_server.tool_parsers.model_json import Malformed, bounded, json_text
from mlx_server.upstream.dialects import ENDS
from mlx_server.upstream.pieces import (
    CHARACTERS_PER_TOKEN,
    AnswerPiece,
    CallPiece,
    GrowingText,
    ReasoningDetails,
    UpstreamUsage,
    is_counted,
    split,
)
from mlx_server.upstream.text_families import ThoughtTags, parser_of


class CollectedCall:
    """Whether a piece continues a call or begins another one is decided by what is known of the
    call so far, never by reading all of it again: an upstream may send any number of pieces."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.extra_content: dict[str, Any] = {}
        """The fields of all pieces, of which later ones take precedence."""
        self.extra_size = 0
        """The number of bytes of the extra contents that came."""
        self._arguments = GrowingText()
        self._last_extra = b""

    @property
    def arguments(self) -> str:
        return str(self._arguments)

    @property
    def size(self) -> int:
        """The number of characters of its name and arguments."""
        return len(self.name) + self._arguments.size

    def add(self, piece: CallPiece) -> None:
        self.id, self.name = self.id or piece.id, self.name or piece.name
        encoded = msgspec.json.encode(piece.extra_content) if piece.extra_content else b""
        if encoded and encoded != self._last_extra:  # some servers send the same in each piece
            self._last_extra = encoded
            self.extra_content |= piece.extra_content
            self.extra_size += len(encoded)
        self._arguments.add(piece.arguments)

    def as_text(self) -> str:
        """The call as JSON, which becomes text of the answer if no tool can be called with it."""
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)


class CollectedCalls:
    """The structured calls of one answer, in their order."""

    def __init__(self) -> None:
        self.calls: list[CollectedCall] = []
        self.size = 0
        """The number of characters of their names and arguments."""
        self.extra_size = 0
        """The number of bytes of their extra contents."""
        self._by_index: dict[int, CollectedCall] = {}

    def add(self, piece: CallPiece) -> None:
        call = self._call_of(piece)
        before, extra_before = call.size, call.extra_size
        call.add(piece)
        self.size += call.size - before
        self.extra_size += call.extra_size - extra_before

    def _call_of(self, piece: CallPiece) -> CollectedCall:
        """The call that a piece belongs to, or a new one. Gemini sends no indices: each of its
        pieces with a name is a call, and one without continues the last."""
        if piece.index is None:
            call = None if piece.name or not self.calls else self.calls[-1]
        else:
            call = self._by_index.get(piece.index)
            # older versions of Ollama give all calls the index 0
            if call and piece.name and piece.id and call.id and piece.id != call.id:
                call = None
        return call or self._new(piece.index)

    def _new(self, index: int | None) -> CollectedCall:
        if len(self.calls) >= limits.UPSTREAM_CALLS:
            raise UpstreamFailed("The upstream sent more calls than one answer may have.")
        call = CollectedCall()
        self.calls.append(call)
        if index is not None:
            self._by_index[index] = call
        return call


class EchoedCalls:
    """Recognises structured calls that were also in the text or in the thoughts."""

    def __init__(self) -> None:
        self._answers = defaultdict[str, Answer](Answer)
        """The calls of the text and of the thoughts."""
        self._left: Counter[tuple[str, str]] | None = None

    def add(self, source: str, event: ToolCallStarted | ToolCallDelta) -> None:
        self._answers[source].add(event)

    def new_in(self, events: list[Event]) -> list[Event]:
        """The events without those of calls that were in the text or the thoughts. Each call there
        removes only one structured call."""
        if not self._answers:
            return events
        if self._left is None:
            begun = (each.begun_calls.values() for each in self._answers.values())
            self._left = Counter(map(_canonical, chain.from_iterable(begun)))
        again = set[int]()
        for number, call in folded(events).begun_calls.items():
            if self._left[written := _canonical(call)]:
                self._left[written] -= 1
                again.add(number)
        kinds = ToolCallStarted | ToolCallDelta | ToolCallFinished
        return [e for e in events if not (isinstance(e, kinds) and e.call in again)]


def _canonical(call: CallSoFar) -> tuple[str, str]:
    """The call's name and arguments in a form that is equal for equal calls."""
    arguments = "".join(call.arguments)
    with suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return call.name, arguments


ENCODING_LEVELS = 4
"""The most times that arguments may be encoded as a JSON string within a JSON string."""


class StructuredCallReader:
    """Parses and repairs collected calls, and emits those that call the request's tools."""

    def __init__(
        self, emitter: ToolCallEmitter, tools: Sequence[Tool], allowed: RepairPolicy
    ) -> None:
        self._emitter = emitter
        self._tools = {tool.name: tool for tool in tools}
        self._allowed = allowed

    def read(self, call: CollectedCall) -> bool:
        """Emits the call, or several calls if its arguments are several objects. Returns False if
        it is not a call of a tool."""
        try:
            bounded(call.arguments)
            found = list(self._readable_calls(call))
        except (Malformed, ExceedsBounds):
            return False
        try:
            for i, (name, arguments, repairs) in enumerate(found):
                self._emitter.misplaced = repairs
                self._emitter.whole(name, arguments, call.id if i == 0 else None)
        except Malformed:
            self._emitter.give_up()
            return False
        return True

    def _readable_calls(
        self, call: CollectedCall
    ) -> Iterator[tuple[str, str, tuple[RepairKind, ...]]]:
        listed = _objects_of_list(call.arguments)
        texts = _objects(call.arguments if listed is None else listed)
        texts = [text for text in texts if text.strip("{} \n")] or texts[:1]
        is_other = len(texts) > 1 or listed is not None
        several: tuple[RepairKind, ...] = ("format",) if is_other else ()
        for text in texts:
            inside, repairs = self._arguments_json(text)
            name = call.name
            if not self._emitter.knows(name):
                taker = self._emitter.nameless(inside) if self._allowed.mistakes else None
                if taker is None:
                    raise Malformed("there is no such tool")
                name, repairs = taker.name, ("name", *repairs)
            inside, unwrapped = self._unwrapped(name, inside)
            yield name, inside, (*several, *repairs, *unwrapped)

    def _unwrapped(self, name: str, inside: str) -> tuple[str, tuple[RepairKind, ...]]:
        """The arguments, taken out of a complete call that was written in their place."""
        tool = self._tools.get(name)
        properties = tool.parameters.get("properties") if tool else None
        takes_a_name = isinstance(properties, Mapping) and "name" in properties
        if not (self._allowed.mistakes and '"name"' in inside) or takes_a_name:
            return inside, ()
        match json_or_none(inside):  # the check of the call reports invalid JSON
            case {"name": again, "arguments": dict(found)} | {
                "name": again,
                "parameters": dict(found),
            } if again == name:
                return json.dumps(found, ensure_ascii=False), ("format",)
        return inside, ()

    def _arguments_json(self, text: str) -> tuple[str, tuple[RepairKind, ...]]:
        """The JSON of a call's arguments, which may be within prose or encoded again. Raises
        Malformed if there is none."""
        if not text.strip() or text.strip() == "null":
            return "{}", ()
        if self._allowed.mistakes and (braced := _braced(text)):
            return braced, ("json",)
        found = json_text(text) if self._allowed.mistakes else (text, ())
        if found is None:
            raise Malformed("no JSON")
        inside, repairs = found
        if inside.startswith('"'):  # the object was encoded as a string again
            return _unquoted(inside), ("json",)
        return inside, repairs


def _braced(text: str) -> str | None:
    """The object for a text that lacks only its braces; None for any other text."""
    inside = text.strip().rstrip(",")
    if not inside.startswith('"') or len(inside) > limits.READ_JSON_CHARACTERS:
        return None
    braced = f"{{{inside}}}"
    return None if json_or_none(braced) is None else braced


def _unquoted(text: str) -> str:
    for _ in range(ENCODING_LEVELS):
        string = json.loads(text)
        if not isinstance(string, str):
            raise Malformed("no object")
        text = string
        if not text.startswith('"'):
            break
    return text


def _objects_of_list(text: str) -> str | None:
    """The objects of a JSON list, written one after the other; None for any other text."""
    if len(text) > limits.READ_JSON_CHARACTERS or not text.lstrip().startswith("["):
        return None
    items = json_or_none(text)
    is_list = isinstance(items, list) and items and all(isinstance(each, dict) for each in items)
    return "".join(json.dumps(each, ensure_ascii=False) for each in items) if is_list else None


def _objects(text: str) -> list[str]:
    """The JSON objects in a text that consists of several; for any other text, only the text."""
    decoder, at, objects = json.JSONDecoder(), 0, list[str]()
    size = len(text)
    if size > limits.READ_JSON_CHARACTERS:
        return [text]
    while True:
        while at < size and (text[at].isspace() or (objects and text[at] in ",;")):
            at += 1
        if at == size:
            return objects if len(objects) > 1 else [text]
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [text]
        if not isinstance(value, dict) or len(objects) >= limits.UPSTREAM_CALLS:
            return [text]
        objects.append(text[at:end])
        at = end


@dataclass(frozen=True)
class ReadingOptions:
    """Options for parsing the answer to one request."""

    family: ModelFamily
    opening: str
    """The delimiter that opens reasoning for the family's parser; empty if it has none."""
    context: ParseContext
    is_chat: bool = True
    stops: tuple[str, ...] = ()
    parallel: bool = True
    """Whether several calls are allowed; if not, the first one ends the answer."""
    expects_calls_as_text: bool = False
    """Whether the prompt asks the model to write calls in its text."""
    keeps_raw: bool = False
    logprobs: int | None = None
    """The number of alternatives to report for each token; None: no log probabilities."""
    bills_prompt: bool = True
    """Whether the prompt's tokens are counted with this answer. Of `n` answers only the first does,
    so that they are counted once."""


NO_TOKEN = -1
"""The token id that parsers get for text without token ids."""


class AnswerReader(OutputProcessor):
    """Turns the pieces of one answer into its events, across one request or two."""

    reasoning_ran_out = False
    """Nothing says that a server's own budget was used up."""

    def __init__(self, options: ReadingOptions) -> None:
        super().__init__(options.context.index, options.stops, parallel=options.parallel)
        self._options = options
        make_parser = partial(parser_of, options.family) if options.is_chat else TextParser
        self._content: Parser = make_parser(options.context)
        self._thoughts: Parser | None = None
        self._made: list[Event] = []
        self._collected = CollectedCalls()
        emitter = ToolCallEmitter(
            self._index,
            options.context.tools,
            self._made.append,
            allowed=options.context.repair,
            holds_calls=True,
        )
        self._structured = StructuredCallReader(
            emitter, options.context.tools, options.context.repair
        )
        self._has_had_logprobs = False
        self._numbers: dict[tuple[str, int], int] = {}
        self._ids: set[str] = set()
        repeats = options.context.repair.loops
        self._loops = None if repeats is None else TextLoopDetector(repeats)
        self._is_looping = False
        self._reported: set[Repaired] = set()
        self._spoken = self._reasoned = self._said = 0
        self._choice: int | None = None
        """The index of the answer that is read; others that the upstream may send are ignored."""
        self._has_others = False
        self._details = ReasoningDetails()
        self._echoed_calls = EchoedCalls()
        self._raw = GrowingText()
        self._finish: str | None = None
        self._stop: str | None = None
        self._usage: UpstreamUsage | None = None
        self.is_unterminated = False
        self._raw_thoughts = GrowingText()
        self._before = TokenCounts()
        """The tokens of the first request, if this is the second of two."""
        self._must_answer = False
        """Whether the prompt has closed the thoughts, so that even reasoning is the answer."""

    @property
    def is_without_answer(self) -> bool:
        """Whether the answer was cut off, or has neither text nor calls so far."""
        return self._finish == "length" or not (self._said or self._calls or self._collected.calls)

    @property
    def content(self) -> str:
        """The content of the response, before parsing."""
        return str(self._raw)

    @property
    def thoughts(self) -> str:
        """The reasoning of the response that was not in its content, before parsing."""
        return str(self._raw_thoughts)

    @property
    def has_begun(self) -> bool:
        """Whether the upstream has sent a piece of an answer."""
        return self._choice is not None

    @property
    def has_ended(self) -> bool:
        """Whether the upstream has sent a finish reason."""
        return self._finish is not None

    @property
    def size(self) -> int:
        """The number of characters of the answer so far, its calls included."""
        return self._spoken + self._collected.size

    @property
    def extra_size(self) -> int:
        """The number of bytes of what the next request must send back to the upstream: the calls'
        extra contents and the details of the reasoning."""
        return self._collected.extra_size + self._details.size

    @property
    def held(self) -> int:
        """The number of characters that have become neither text nor reasoning so far."""
        return self.size - self._said - self._reasoned

    @property
    def progress(self) -> object:
        """A value that differs from all before it if a piece has added to the answer."""
        return self.size, len(self._collected.calls), self._finish is None

    @property
    def needs_no_more(self) -> bool:
        """Whether the answer is complete, or repeats itself without end."""
        return self.is_complete or self._is_looping

    def parts(self, piece: AnswerPiece) -> Iterator[AnswerPiece]:
        """Yields what is new in a piece, in parts that take little time to parse."""
        self._usage = piece.usage or self._usage
        if piece.choice is None:
            return
        if self._choice is None:
            self._choice = piece.choice
        self._has_others = self._has_others or piece.has_others or piece.choice != self._choice
        if piece.choice != self._choice:
            return
        if piece.finish == "error":
            raise UpstreamFailed("The upstream reports that the answer failed.")
        self._finish, self._stop = piece.finish or self._finish, piece.stop or self._stop
        yield from split(piece)

    def feed(self, piece: AnswerPiece) -> Iterator[Event]:
        """Yields the events of a part."""
        self._spoken += len(piece.text) + len(piece.reasoning)
        for call in piece.calls:
            self._collected.add(call)
        if self.size > limits.UPSTREAM_CHARACTERS:
            raise UpstreamFailed("The upstream sent an answer that is too long.")
        self._details.add(piece.details)
        if self.extra_size > limits.UPSTREAM_EXTRA_BYTES:
            raise UpstreamFailed("The upstream sent too much to be sent back to it.")
        if piece.reasoning and self._must_answer:
            yield from self._repaired(Repaired(self._index, "reasoning", "content"))
            piece = replace(piece, text=piece.reasoning + piece.text, reasoning="")
        if piece.reasoning:
            self._raw_thoughts.add(piece.reasoning)
            yield from self._feed_reasoning(piece.reasoning)
        if piece.text:
            yield from self._end_thoughts(cut=True)
            self._raw.add(piece.text)
            self._add_logprobs(piece.logprobs)
            yield from self._forward("content", self._content.feed(NO_TOKEN, piece.text))
        texts = (piece.reasoning, piece.text, *(call.arguments for call in piece.calls))
        if self._loops and any(map(self._loops.add, texts)) and not self._is_looping:
            self._is_looping = True
            place = "reasoning_content" if piece.reasoning else "content"
            place = "tool_calls" if piece.calls else place
            what = f"{place}: it repeated the same {self._loops.period} words, so it was ended"
            yield Violation(self._index, what)

    def close_thoughts(self, tags: ThoughtTags) -> Iterator[Event]:
        """Prepares for a second request, whose prompt has this response with closed thoughts."""
        yield from self._end_thoughts(cut=True)
        if tags.is_open(self.content):
            yield from self._forward("content", self._content.feed(NO_TOKEN, tags.closing))
        self._before, self._must_answer = self.counts, True
        self._collected, self._usage, self._finish = CollectedCalls(), None, None
        self._spoken = self._reasoned = self._said = 0

    def finish(self) -> Iterator[Event]:
        """Yields the last events of the answer, the very last of which is `Finished`."""
        cut = self._finish == "length"
        if self._thoughts:
            self.is_unterminated = self._thoughts.is_unterminated and cut
            is_all = not (self._said or self._collected.calls)
            yield from self._end_thoughts(cut=cut or not is_all)
        yield from self._forward("content", self._content.finish(cut=cut))
        self.is_unterminated = self.is_unterminated or self._content.is_unterminated
        yield from self._structured_calls(cut=cut)
        yield from self._stops.finish()
        if self._finish and self._finish not in ENDS:
            what = f"the upstream says {self._finish[:40]!r}, which is no reason that is known here"
            yield Violation(self._index, f"finish_reason: {what}")
        if self._finish == "content_filter":
            yield Violation(self._index, "content: the upstream's content filter ended the answer")
        if self._has_others:
            yield Violation(self._index, "choices: the upstream sent several, this is the first")
        is_scored = self._options.logprobs is not None
        if is_scored and self._said and not self._has_had_logprobs:
            yield Violation(self._index, "logprobs: the upstream sent none")
        if not is_counted(self._usage, self.size):
            yield from self._repaired(Repaired(self._index, "usage", "usage"))
        yield self._finished()

    def _feed_reasoning(self, text: str) -> Iterator[Event]:
        if not self._options.opening:
            yield from self._forward("thoughts", [ReasoningDelta(self._index, text)])
            return
        if self._thoughts is None:
            self._thoughts = self._options.family.make_parser(
                replace(self._options.context, continues=False, ends_with="")
            )
            opened = self._thoughts.feed(NO_TOKEN, self._options.opening)
            yield from self._forward("thoughts", opened)
        yield from self._forward("thoughts", self._thoughts.feed(NO_TOKEN, text))

    def _end_thoughts(self, *, cut: bool) -> Iterator[Event]:
        thoughts, self._thoughts = self._thoughts, None
        if thoughts:
            yield from self._forward("thoughts", thoughts.finish(cut=cut))

    def _structured_calls(self, *, cut: bool) -> Iterator[Event]:
        for number, call in enumerate(self._collected.calls):
            if self.is_complete:
                return
            is_last = number == len(self._collected.calls) - 1
            if not (call.name or call.arguments):
                continue
            is_call = self._structured.read(call)
            calls, self._made[:] = list(self._made), []
            new = self._echoed_calls.new_in(calls)
            if len(new) < len(calls):
                yield from self._repaired(Repaired(self._index, "stutter", "tool_calls"))
            yield from self._forward("structured", self._with_extra(new, call.extra_content))
            if not is_call and not (cut and is_last):
                what = "what the upstream sent as a call can't be made, so it is text"
                yield Violation(self._index, f"tool_calls[{self._calls}]: {what}")
                separator = "\n" if self._said else ""
                text = TextDelta(self._index, call.as_text(), separator=separator)
                yield from self._forward("structured", [text])

    def _with_extra(self, events: Iterable[Event], extra: Mapping[str, Any]) -> Iterator[Event]:
        """The events of one call, the first of which gets the fields that must be sent back to the
        upstream. The answer's first call gets the details of its reasoning too."""
        for event in events:
            if isinstance(event, ToolCallStarted):
                details = {} if self._calls else self._details.found()
                event = replace(event, extra_content={**extra, **details} or None)
                extra = {}
            yield event

    def _forward(self, source: str, events: Iterable[Event]) -> Iterator[Event]:
        events = [*events]
        self._announce(events, self._content)
        for event in events:
            if self.is_complete:
                return
            match event:
                case Repaired(where=where):
                    yield from self._repaired(replace(event, where=self._numbered(source, where)))
                    continue
                case Violation(what=what):
                    event = replace(event, what=self._numbered(source, what))
                case TextDelta(text=text):
                    self._said += len(text)
                    if source == "thoughts" and text.strip():
                        yield from self._repaired(Repaired(self._index, "reasoning", "content"))
                case ReasoningDelta(text=text):
                    self._reasoned += len(text)
                    if source == "content":
                        place = "reasoning_content"
                        yield from self._repaired(Repaired(self._index, "reasoning", place))
                case ToolCallStarted() | ToolCallDelta() | ToolCallFinished():
                    event, repaired = self._call_event(source, event)
                    yield from self._repaired(*repaired)
            yield from self._report(event)

    def _add_logprobs(self, logprobs: Iterable[TokenLogprob]) -> None:
        if (count := self._options.logprobs) is not None:
            for each in logprobs:
                self._has_had_logprobs = True
                top = sorted(each.top, key=lambda other: -(other.logprob or 0.0))[:count]
                self._logprobs.append(replace(each, top=tuple(top)))

    def _call_event(
        self, source: str, event: ToolCallStarted | ToolCallDelta | ToolCallFinished
    ) -> tuple[ToolCallStarted | ToolCallDelta | ToolCallFinished, Sequence[Repaired]]:
        """The event with the call's number among those of all sources, and what it repairs."""
        if source != "structured" and not isinstance(event, ToolCallFinished):
            self._echoed_calls.add(source, event)
        if isinstance(event, ToolCallStarted):
            if len(self._ids) >= limits.UPSTREAM_CALLS:
                raise UpstreamFailed("The upstream sent more calls than one answer may have.")
            self._numbers[source, event.call] = len(self._numbers)
            id = new_id() if event.id in self._ids else event.id
            self._ids.add(id)
            event = replace(event, id=id)
        number = self._numbers[source, event.call]
        repaired = []
        is_text = source == "content" and not self._options.expects_calls_as_text
        if isinstance(event, ToolCallFinished) and is_text:
            place = f"tool_calls[{number}]"
            if not any(each.where.startswith(place) for each in self._reported):
                repaired = [Repaired(self._index, "unmarked", place)]
        return replace(event, call=number), repaired

    def _repaired(self, *events: Repaired) -> Iterator[Event]:
        for event in events:
            if event not in self._reported:
                self._reported.add(event)
                yield from self._report(event)

    def _numbered(self, source: str, path: str) -> str:
        numbers = self._numbers
        return renumbered(path, lambda call: numbers.get((source, call), len(numbers)))

    @property
    def counts(self) -> TokenCounts:
        """The upstream's counts; those that it does not send are estimated by characters."""
        usage, bills = self._usage or UpstreamUsage(), self._options.bills_prompt
        completion = usage.completion
        if completion is None or not is_counted(self._usage, self.size):
            completion = -(-self.size // CHARACTERS_PER_TOKEN)
        reasoning, both = usage.reasoning, self._reasoned + self._said
        if reasoning is None:
            reasoning = round(completion * self._reasoned / both) if both else 0
        reasoning = min(reasoning, completion)
        counts = TokenCounts(
            completion_tokens=completion,
            cached_tokens=usage.cached if bills else 0,
            reasoning_tokens=reasoning,
            text_tokens=0 if self._calls or not self._said else completion - reasoning,
            further_prompt_tokens=(usage.prompt or 0) if bills else 0,
        )
        return total((self._before, counts))

    def _finished(self) -> Finished:
        # the upstream's reason is corrected where it contradicts the answer
        is_cut = self._finish == "length" and not (self._stops.matched or self._calls)
        reason: FinishReason = "length" if is_cut else "stop"
        finished = self._end(reason, self.counts)
        return replace(
            finished,
            stop_string=finished.stop_string or (None if self._calls else self._stop),
            raw=(str(self._raw),) if self._options.keeps_raw else (),
        )
