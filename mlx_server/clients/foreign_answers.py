"""Reads answers of other servers as carefully as the server reads its own models' tokens.

A message of OpenAI's API is the input and the output: thoughts that leaked into the text, calls in
the text or the thoughts, and slips in calls are put right, and reported in `mlx_server.repairs`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mlx_server.api.accumulator import AccumulatedAnswer, warnings_body
from mlx_server.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Repaired,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
)
from mlx_server.parsers.misplaced_calls import MisplacedCallReader
from mlx_server.reading import OutputReader, ToolDescription, as_tool
from mlx_server.repair.allowed import ALL_REPAIRS, RepairPolicy
from mlx_server.repair.json_text import json_text, parsed
from mlx_server.repair.malformed import Malformed
from mlx_server.tool_parsers.calls import ToolCallEmitter

Wire = dict[str, Any]

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class ForeignAnswerReader:
    """Turns one answer's message, or the deltas of its stream, into events."""

    def __init__(
        self,
        family: str,
        tools: Sequence[ToolDescription] = (),
        *,
        index: int = 0,
        repair: RepairPolicy = ALL_REPAIRS,
    ) -> None:
        offered = tuple(map(as_tool, tools))
        self._index = index
        self._text = OutputReader(family, offered, index=index, repair=repair)
        self._events: list[Event] = []
        self._emitter = ToolCallEmitter(
            index, offered, self._events.append, allowed=repair, holds_calls=True
        )
        self._in_reasoning = MisplacedCallReader(self._emitter, offered, repair, makes=True)
        self._written: dict[int, Wire] = {}
        """The id, name and arguments of each call in `tool_calls`, as far as they came."""
        self._reasoning: list[str] = []
        self._calls = 0
        """Calls that the text has had."""
        self._has_text = False

    def feed(self, delta: Mapping[str, Any]) -> list[Event]:
        if thought := thoughts_of(delta):
            self._reasoning.append(thought)
            self._events.append(ReasoningDelta(self._index, thought))
        if text := _text(delta.get("content")):
            self._take(self._text.feed(text))
        for position, call in enumerate(_listed(delta.get("tool_calls"))):
            self._add_call(position, call)
        if isinstance(function := delta.get("function_call"), Mapping):
            self._add_call(0, {"function": function})
        return self._given()

    def finish(self, reason: str | None) -> list[Event]:
        """reason: the server's `finish_reason`, which does not count where there are calls."""
        events = self._text.finish(cut=reason == "length")
        self._take(each for each in events if not isinstance(each, Finished))
        before = self._given()
        for call in self._written.values():
            self._read_call(call)
        if not (self._has_text or self._calls or self._events):
            with suppress(Malformed):
                found = self._in_reasoning.at_end_of("".join(self._reasoning))
                self._in_reasoning.emit(found, "reasoning")
        events = [*before, *map(self._renumbered, self._given())]
        has_calls = self._calls or any(isinstance(each, ToolCallFinished) for each in events)
        ended: FinishReason = "tool_calls"
        if not has_calls:
            ended = "length" if reason == "length" else "stop"
        return [*events, Finished(self._index, ended, 0, 0)]

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            self._has_text |= isinstance(event, TextDelta) and not event.text.isspace()
            self._calls += isinstance(event, ToolCallFinished)
            self._events.append(event)

    def _given(self) -> list[Event]:
        events = self._events[:]
        self._events.clear()
        return events

    def _add_call(self, position: int, call: Mapping[str, Any]) -> None:
        number = call.get("index")
        known = self._written.setdefault(
            number if isinstance(number, int) else position, {"id": "", "name": "", "arguments": ""}
        )
        function = call.get("function")
        function = function if isinstance(function, Mapping) else call
        known["id"] = known["id"] or _text(call.get("id"))
        known["name"] += _text(function.get("name"))
        arguments = function.get("arguments", "")
        if isinstance(arguments, str):
            known["arguments"] += arguments
        elif arguments is not None:
            known["arguments"] = arguments

    def _read_call(self, call: Wire) -> None:
        name, arguments = call["name"], call["arguments"] or {}
        try:
            self._emitter.whole(name, arguments, call["id"] or None)
        except Malformed:
            self._emitter.give_up()
            with suppress(Malformed):
                self._emitter.add_repaired(*_with_prose(name, arguments))
                return
            self._emitter.give_up()
            self._events.append(TextDelta(self._index, f"{name}({arguments})"))
            self._events.append(
                Violation(self._index, "tool_calls: a call of no offered tool, or without JSON")
            )

    def _renumbered(self, event: Event) -> Event:
        """The calls of `tool_calls` follow those of the text."""
        if isinstance(event, ToolCallStarted | ToolCallDelta | ToolCallFinished):
            return replace(event, call=event.call + self._calls)
        return event


def _with_prose(name: str, arguments: object) -> tuple[list[tuple[str, Any]], tuple[Any, ...]]:
    """The arguments in a text that has prose or code fences around them, and their repairs."""
    found = json_text(arguments) if isinstance(arguments, str) else None
    inside = parsed(found[0]) if found else None
    if found is None or not isinstance(inside, dict):
        raise Malformed("no JSON object in the arguments")
    return [(name, inside)], found[1] or ("json",)


def read_completion(
    body: Mapping[str, Any],
    family: str,
    tools: Sequence[ToolDescription] = (),
    repair: RepairPolicy = ALL_REPAIRS,
) -> Wire:
    """The body of a chat completion, with each of its messages read."""
    choices: list[Wire] = []
    answers: list[AccumulatedAnswer] = []
    for index, choice in enumerate(_listed(body.get("choices"))):
        message = choice.get("message")
        message = message if isinstance(message, Mapping) else {"content": choice.get("text")}
        reader = ForeignAnswerReader(family, tools, index=index, repair=repair)
        events = [*reader.feed(message), *reader.finish(choice.get("finish_reason"))]
        answer = _gathered(events)
        answers.append(answer)
        choices.append(
            {**choice, "message": _message(message, answer), "finish_reason": answer.finish_reason}
        )
    return {**body, "choices": choices, **_warnings(body, answers)}


class ForeignStreamReader:
    """Turns the chunks of a stream into those of the same answers, read."""

    def __init__(
        self,
        family: str,
        tools: Sequence[ToolDescription] = (),
        repair: RepairPolicy = ALL_REPAIRS,
    ) -> None:
        self._family, self._tools, self._repair = family, tools, repair
        self._readers: dict[int, ForeignAnswerReader] = {}
        self._answers: dict[int, AccumulatedAnswer] = {}
        self._finished: set[int] = set()

    def feed(self, chunk: Mapping[str, Any]) -> list[Wire]:
        choices = _listed(chunk.get("choices"))
        if not choices:
            return [{**chunk, "choices": []}]
        return [made for choice in choices for made in self._choice(chunk, choice)]

    def _choice(self, chunk: Mapping[str, Any], choice: Wire) -> Iterator[Wire]:
        index = choice.get("index")
        index = index if isinstance(index, int) else 0
        if index in self._finished:
            return
        reader = self._readers.get(index) or self._begun(index)
        delta, reason = choice.get("delta"), choice.get("finish_reason")
        events = reader.feed(delta if isinstance(delta, Mapping) else {})
        if reason:
            self._finished.add(index)
            events += reader.finish(reason)
        answer = self._answers.setdefault(index, AccumulatedAnswer())
        for event in events:
            _add(answer, event)
            if made := _delta(event):
                yield {**chunk, "choices": [{**choice, "delta": made, "finish_reason": None}]}
        if reason:
            last = {**choice, "delta": {}, "finish_reason": answer.finish_reason}
            yield {**chunk, "choices": [last], **_warnings(chunk, [answer])}

    def _begun(self, index: int) -> ForeignAnswerReader:
        reader = ForeignAnswerReader(self._family, self._tools, index=index, repair=self._repair)
        return self._readers.setdefault(index, reader)


def _gathered(events: Iterable[Event]) -> AccumulatedAnswer:
    answer = AccumulatedAnswer()
    for event in events:
        _add(answer, event)
    return answer


def _add(answer: AccumulatedAnswer, event: Event) -> None:
    match event:
        case TextDelta():
            answer.texts.append(event.separated)
        case ReasoningDelta():
            answer.reasoning.append(event.separated)
        case ToolCallStarted() | ToolCallDelta() | ToolCallFinished():
            answer.add_call(event)
        case Repaired():
            answer.repairs.append(event)
        case Violation():
            answer.violations.append(event)
        case Finished():
            answer.finish_reason = event.reason


def _message(message: Mapping[str, Any], answer: AccumulatedAnswer) -> Wire:
    kept = {name: found for name, found in message.items() if name not in REASONING_FIELDS}
    kept.pop("tool_calls", None)
    kept.pop("function_call", None)
    text = "".join(answer.texts)
    made: Wire = {"role": "assistant", **kept, "content": text or (None if answer.calls else "")}
    if answer.reasoning:
        made["reasoning_content"] = "".join(answer.reasoning)
    if answer.calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return made


def _delta(event: Event) -> Wire:
    match event:
        case TextDelta():
            return {"content": event.separated}
        case ReasoningDelta():
            return {"reasoning_content": event.separated}
        case ToolCallStarted(_, call, id, name):
            function = {"name": name, "arguments": ""}
            begun = {"index": call, "id": id, "type": "function", "function": function}
            return {"tool_calls": [begun]}
        case ToolCallDelta(_, call, arguments):
            return {"tool_calls": [{"index": call, "function": {"arguments": arguments}}]}
    return {}


def _warnings(body: Mapping[str, Any], answers: Sequence[AccumulatedAnswer]) -> Wire:
    """The `mlx_server` member; with what the server reported itself, if it is one of ours."""
    repairs = [repair for each in answers for repair in each.repairs]
    violations = [violation for each in answers for violation in each.violations]
    found = warnings_body(repairs, (), violations)
    reported = body.get("mlx_server")
    if not (found and isinstance(reported, Mapping)):
        return found
    lists = {
        name: [*_list(reported.get(name)), *each] for name, each in found["mlx_server"].items()
    }
    return {"mlx_server": {**reported, **lists}}


def thoughts_of(delta: Mapping[str, Any]) -> str:
    """The reasoning, which a server may send under several names."""
    texts = (_text(delta.get(name)) for name in REASONING_FIELDS)
    if found := next(filter(None, texts), ""):
        return found
    details = _listed(delta.get("reasoning_details"))
    return "".join(_text(each.get("text") or each.get("summary")) for each in details)


def _text(content: object) -> str:
    """The text of a content, which may have parts."""
    if isinstance(content, str):
        return content
    return "".join(_text(part.get("text")) for part in _listed(content))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _listed(value: object) -> list[Wire]:
    """The objects of a list; empty for what is none, such as `"choices": null`."""
    return [each for each in _list(value) if isinstance(each, dict)]
