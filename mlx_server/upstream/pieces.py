"""Reads one JSON value of an upstream's answer, a body or a chunk, as a piece of the answer."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from mlx_server.errors import UpstreamFailed
from mlx_server.events import TokenLogprob
from mlx_server.upstream.dialects import reason_of_end
from mlx_server.upstream.logprobs import logprobs_of
from mlx_server.upstream.responses import decoded
from mlx_server.upstream.usage import UpstreamUsage, usage_of, whole_number


class GrowingText:
    """Adding a piece, and comparing one with the text so far, takes no more work than the piece is
    long."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.size = 0

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return "".join(self._pieces)

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self.size += len(piece)

    def begins(self, piece: str) -> bool:
        """Whether the piece begins with all of the text so far."""
        return self.size <= len(piece) and piece.startswith(str(self))

    def clear(self) -> None:
        self._pieces.clear()
        self.size = 0


REASONING = (
    *("reasoning_content", "reasoning", "thinking", "reasoning_text", "thought", "thoughts"),
    *("thinking_content", "reasoningContent", "thinkingContent", "reasoning_output", "cot"),
    *("thought_process", "chain_of_thought", "analysis"),
)
"""Fields of a message that may have its reasoning. If there are several, they have the same one."""

GATEWAY_FIELDS = ("provider_specific_fields", "model_extra")
"""Fields into which gateways move the fields of a message that they don't know."""

DETAIL_FIELDS = ("reasoning_details", "thinking_blocks")

FIELDS = frozenset((*REASONING, *GATEWAY_FIELDS, *DETAIL_FIELDS))

TEXT_FIELDS = (
    *("text", "thinking", "summary", "reasoning", "content", "think", "thought", "parts", "value"),
    *("output_text", "reasoning_content", "reasoning_text"),
)
"""Fields of a content part, or of a reasoning detail, that may have its text."""

THOUGHTS = frozenset(
    (
        *("thinking", "think", "thought", "thoughts", "reasoning", "reasoning.text"),
        *("reasoning.summary", "summary", "reasoning_content", "reasoning_text"),
    )
)
"""The `type` values of content parts that are reasoning."""

CALLS = ("tool_use", "tool_call", "function_call", "functionCall", "toolCall")
"""The `type` values of content parts that are calls, and the fields that may have the call."""

NESTING_LEVELS = 8
"""The number of levels of nested parts in which a text is searched."""


@dataclass
class Content:
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def thought(self) -> str:
        return "".join(self.thoughts)


def read_content(content: Any) -> Content:
    """Reads a message's content. Raises UpstreamFailed for a value of another type."""
    match content:
        case None:
            return Content()
        case str():
            return Content([content])
        case bool():
            raise UpstreamFailed("The upstream sent a `content` that is not text.")
        case int() | float():  # a JSON answer that a server has parsed
            return Content([json.dumps(content)])
        case Mapping():
            is_part = content.get("type") or not content or any(n in content for n in TEXT_FIELDS)
            if not (is_part or any(name in content for name in CALLS)):
                return Content([json.dumps(content, ensure_ascii=False)])
            return _content_of_parts([content])
        case list():
            return _content_of_parts(content)
    raise UpstreamFailed("The upstream sent a `content` that is not text.")


def _content_of_parts(parts: list[Any]) -> Content:
    found = Content()
    for part in parts:
        if isinstance(part, str):
            found.texts.append(part)
        elif isinstance(part, Mapping):
            if call := _call_in(part):
                found.calls.append(call)
            else:
                (found.thoughts if _is_thought(part) else found.texts).append(part_text(part))
    return found


def _is_thought(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return (isinstance(kind, str) and kind in THOUGHTS) or part.get("thought") is True


def _call_in(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for name in CALLS:
        if isinstance(call := part.get(name), Mapping):
            return call
    return part if part.get("type") in CALLS else None


def part_text(part: Mapping[str, Any], depth: int = 0) -> str:
    """The text of a part or, if it has parts itself, of those; empty if it has none."""
    for name in TEXT_FIELDS if depth < NESTING_LEVELS else ():
        match part.get(name):
            case str(text) if text:
                return text
            case Mapping() as found if within := part_text(found, depth + 1):
                return within
            case [*items]:
                return "".join(
                    item if isinstance(item, str) else part_text(item, depth + 1)
                    for item in items
                    if isinstance(item, str | Mapping)
                )
    return ""


def reasoning_of(said: Mapping[str, Any]) -> str:
    """The reasoning in a message or a delta, without that in its content."""
    if FIELDS.isdisjoint(said):  # the usual case
        return ""
    within = (found for name in GATEWAY_FIELDS if isinstance(found := said.get(name), Mapping))
    places = (said, *within)
    texts = (_reasoning(place) or "".join(_details(place)) for place in places)
    return next(filter(None, texts), "")


def _reasoning(said: Mapping[str, Any]) -> str:
    for name in REASONING:
        match said.get(name):
            case str(text) if text:
                return text
            case Mapping() as found:
                return part_text(found)
            case (
                None | "" | bool() | list()
            ):  # a bool is a server's own setting, a list has details
                continue
            case _:
                raise UpstreamFailed(f"The upstream sent a `{name}` that is not text.")
    return ""


def _details(said: Mapping[str, Any]) -> Iterator[str]:
    for name in (*DETAIL_FIELDS, *REASONING):
        found = said.get(name)
        if isinstance(found, str | Mapping):
            found = [found]
        if isinstance(found, list):
            for part in _text_parts(found):
                yield part if isinstance(part, str) else part_text(part)
            return


def _text_parts(found: list[Any]) -> Iterator[str | Mapping[str, Any]]:
    return (part for part in found if isinstance(part, str | Mapping))


CALL_FIELDS = ("tool_calls", "toolCalls", "tool_call", "function_calls")
NAMES = ("name", "tool_name", "function_name", "toolName", "tool")
ARGUMENTS = (
    *("arguments", "parameters", "args", "input", "tool_input", "tool_args", "arguments_json"),
    *("toolInput", "kwargs"),
)


@dataclass(frozen=True, slots=True)
class CallPiece:
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_object: bool = False
    """Whether the arguments came as an object, which `arguments` has as JSON."""
    is_misnumbered: bool = False
    """Whether the upstream's JSON has an index that is not an integer."""
    extra_content: Mapping[str, Any] = field(default_factory=dict)
    """The provider's own fields of the call, which must be sent back with it, for example Gemini's
    signature of the thoughts."""


def calls_of(
    said: Mapping[str, Any],
    choice: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    *,
    are_whole: bool,
) -> Iterator[CallPiece]:
    """Yields the calls of a message or delta, `said`, or next to it in its `choice`.

    parts: the calls among the parts of its content. are_whole: whether each call is complete, so
    that wrong indices do not matter.
    """
    found = next(
        (each[name] for each in (said, choice) for name in CALL_FIELDS if each.get(name)), None
    )
    if not found and isinstance(said.get("function_call"), Mapping):
        found = [{"index": 0, "function": said["function_call"]}]
    calls = [call for call in (*_call_list(found), *parts) if call is not None]
    for position, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise UpstreamFailed("The upstream sent a call that is not an object.")
        piece = _call_piece(call)
        yield replace(piece, index=position) if are_whole else piece


def _call_list(found: Any) -> list[Any]:
    if isinstance(found, str):
        found = _value_of(found)
    if isinstance(found, Mapping):
        is_numbered = bool(found) and all(str(name).isdigit() for name in found)
        return list(found.values()) if is_numbered else [found]
    if not found:
        return []
    if not isinstance(found, list):
        raise UpstreamFailed("The upstream sent `tool_calls` that are not a list.")
    return found


def _value_of(text: str) -> Any:
    """The value of a JSON text; the text itself if it is not JSON."""
    try:
        return decoded(text)
    except (ValueError, RecursionError):
        return text


def _call_piece(call: Mapping[str, Any]) -> CallPiece:
    """Reads a call, whose name and arguments are in its `function` or next to that."""
    inside = call.get("function") or call.get("custom")
    if isinstance(inside, str) and inside.lstrip().startswith("{"):
        inside = _value_of(inside)
    function = inside if isinstance(inside, Mapping) else call
    names = (*map(function.get, NAMES), inside)
    arguments: Any = next((function[key] for key in ARGUMENTS if key in function), "")
    index, id = call.get("index"), call.get("id") or call.get("call_id")
    is_object = isinstance(arguments, Mapping)
    if not isinstance(arguments, str):  # no tool accepts JSON of a type other than an object
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    extra = call.get("extra_content")
    return CallPiece(
        index=whole_number(index),
        extra_content=extra if isinstance(extra, Mapping) else {},
        is_misnumbered=index is not None and type(index) is not int,
        id=id if isinstance(id, str) else "",
        name=next((name for name in names if isinstance(name, str) and name), ""),
        arguments=arguments,
        is_object=is_object,
    )


DETAILS = "reasoning_details"

GROWING = ("text", "summary", "signature")
"""Fields of a detail whose text a stream sends in pieces."""


class ReasoningDetails:
    """The details of one answer, which the next request must send back to the upstream."""

    def __init__(self) -> None:
        self._details: list[dict[str, Any]] = []
        self.size = 0
        """The number of bytes of their JSON, about."""

    def add(self, pieces: Iterable[Mapping[str, Any]]) -> None:
        for piece in pieces:
            if not (self._details and _continues(self._details[-1], piece)):
                self._details.append({})
            self.size += _extend(self._details[-1], piece)

    def found(self) -> dict[str, Any]:
        """The details as the field of a message; empty if there are none."""
        return {DETAILS: [_joined(detail) for detail in self._details]} if self._details else {}


def _continues(detail: Mapping[str, Any], piece: Mapping[str, Any]) -> bool:
    """Whether a piece continues the last detail. Encrypted details always come in one piece."""
    if "data" in piece or "data" in detail:
        return False
    return all(detail.get(name) == piece.get(name) for name in ("type", "index"))


def _extend(detail: dict[str, Any], piece: Mapping[str, Any]) -> int:
    """Adds a piece to its detail; returns the number of bytes that the detail grew by, about."""
    size = 0
    for name, value in piece.items():
        before = detail.get(name)
        if name in GROWING and isinstance(value, str):
            pieces = before if isinstance(before, GrowingText) else GrowingText()
            pieces.add(value)
            detail[name] = pieces
            size += len(value)
        elif name not in detail or not (value is None or value == before):
            detail[name] = value
            size += len(name) + len(msgspec.json.encode(value))
    return size


def _joined(detail: Mapping[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, GrowingText) else v for k, v in detail.items()}


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    finish: str | None = None
    stop: str | None = None
    """The stop string that ended the answer, if the upstream names it."""
    usage: UpstreamUsage | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int | None = 0
    """The index of the answer; None if the piece belongs to none."""
    has_others: bool = False
    """Whether the same value has pieces of other answers."""
    details: tuple[Mapping[str, Any], ...] = ()
    """The unchanged `reasoning_details`, which OpenRouter needs back for their signatures."""
    reasoning_field: str | None = None
    """The field that had the reasoning as text; None if there is none."""
    is_whole: bool = False
    """Whether the piece is a complete message and not a delta."""


PART_CHARACTERS = 256
"""The most characters of a text that are parsed at a time. Some texts take 25 us a character."""


def read_piece(value: Any) -> AnswerPiece:
    """Reads one JSON value of a response. Raises UpstreamFailed for a value that is not part of an
    answer."""
    if not isinstance(value, Mapping):
        raise UpstreamFailed("The upstream sent JSON that is not an object.")
    choices = value.get("choices")
    choice = _first_choice(choices)
    usage = usage_of(value, choice)
    if choice is None:
        return AnswerPiece(usage=usage, choice=None)
    delta, message = _message_object(choice.get("delta")), _message_object(choice.get("message"))
    is_whole = delta is None and message is not None
    said = delta if delta is not None else message
    if said is None:
        said = {"content": choice.get("text")}
    content = read_content(said.get("content"))
    stop = choice.get("stop_reason")
    return AnswerPiece(
        text=content.text or _refusal(said),
        reasoning=reasoning_of(said) or content.thought or reasoning_of(choice),
        calls=tuple(calls_of(said, choice, content.calls, are_whole=is_whole)),
        finish=reason_of_end(choice, said, value),
        stop=stop if isinstance(stop, str) and choice.get("finish_reason") else None,
        usage=usage,
        logprobs=logprobs_of(choice),
        choice=whole_number(choice.get("index")) or 0,
        has_others=isinstance(choices, list) and sum(each is not None for each in choices) > 1,
        details=tuple(_signed_details(said)),
        reasoning_field=next((name for name in REASONING if _is_text(said.get(name))), None),
        is_whole=is_whole,
    )


def split(piece: AnswerPiece) -> Iterator[AnswerPiece]:
    """Yields a piece in parts whose texts are short."""
    text, reasoning, size = piece.text, piece.reasoning, PART_CHARACTERS
    if len(text) <= size and len(reasoning) <= size:  # the usual case
        yield piece
        return
    for begin in range(0, len(reasoning), size):
        yield AnswerPiece(reasoning=reasoning[begin : begin + size])
    for begin in range(0, len(text), size):
        yield AnswerPiece(text=text[begin : begin + size], logprobs=() if begin else piece.logprobs)
    yield replace(piece, text="", reasoning="", logprobs=())


def _message_object(found: Any) -> Mapping[str, Any] | None:
    """A message or a delta as an object; None if there is none."""
    match found:
        case None | Mapping():
            return found
        case str():
            return {"content": found}
        case [Mapping() as only]:
            return only
    raise UpstreamFailed("The upstream sent a `delta` that is not an object.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _signed_details(said: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    found = said.get("reasoning_details")
    for detail in found if isinstance(found, list) else ():
        if isinstance(detail, Mapping) and isinstance(detail.get("type"), str):
            yield detail


def _first_choice(choices: Any) -> Mapping[str, Any] | None:
    """The choice with the lowest index; None if there is none, as in a chunk with the usage."""
    if isinstance(choices, Mapping):
        is_numbered = bool(choices) and all(str(name).isdigit() for name in choices)
        choices = list(choices.values()) if is_numbered else [choices]
    if choices is None:
        return None
    if not isinstance(choices, list):
        raise UpstreamFailed("The upstream sent `choices` that are not a list.")
    found = [{"text": each} if isinstance(each, str) else each for each in choices if each]
    if not all(isinstance(choice, Mapping) for choice in found):
        raise UpstreamFailed("The upstream sent a choice that is not an object.")
    return min(found, key=lambda each: whole_number(each.get("index")) or 0, default=None)


def _refusal(said: Mapping[str, Any]) -> str:
    refusal = said.get("refusal")
    return refusal if isinstance(refusal, str) else ""
