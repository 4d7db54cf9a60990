"""Reads the JSON of an upstream's answer, whatever names and types it uses."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_server.errors import UpstreamFailed
from mlx_server.events import TokenLogprob
from mlx_server.upstream.logprobs import logprobs_of

REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_text", "thought")
"""Fields of a message that have its reasoning. A server that sends several says the same in all."""

INSIDE = ("text", "thinking", "summary", "reasoning", "content")
"""Fields of a part of a content, or of a reasoning detail, that have its text."""

THOUGHTS = frozenset(("thinking", "reasoning", "reasoning.text", "reasoning.summary", "summary"))
"""Types of a content's parts that are reasoning."""

ENDS: Mapping[str, str] = {
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_length": "length",
    "time_limit": "length",
    "end_turn": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
    "tool_call": "tool_calls",
    "cancelled": "error",
    "abort": "error",
    "network_error": "error",
    "insufficient_system_resource": "error",
    "safety": "content_filter",
    "recitation": "content_filter",
    "sensitive": "content_filter",
}
"""Other servers' names for OpenAI's reasons."""


COUNTS = ("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens")

NUMBER = re.compile(r"-?[0-9]{1,15}")

MAX_TOKENS = 1 << 40
"""A count of tokens that is not less is wrong."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str | Mapping[str, Any] = ""
    is_misnumbered: bool = False
    """Whether the index is no integer in the upstream's JSON."""
    extra_content: Mapping[str, Any] = field(default_factory=dict)
    """The provider's own fields, which it wants back: Gemini's signature of the thoughts."""


@dataclass(frozen=True, slots=True)
class UpstreamUsage:
    prompt: int | None = None
    completion: int | None = None
    cached: int = 0
    reasoning: int | None = None
    is_mistyped: bool = False
    """Whether a count is no integer in the upstream's JSON."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    finish: str | None = None
    stop: str | None = None
    """The stop string that ended the answer, where the upstream names it."""
    usage: UpstreamUsage | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int | None = 0
    """The number of the answer; None if the piece belongs to none."""
    has_others: bool = False
    """Whether other answers came with it."""
    details: tuple[Mapping[str, Any], ...] = ()
    """`reasoning_details` as they came: OpenRouter wants them back, with their signatures."""
    reasoning_field: str | None = None
    """The field that had the reasoning as text."""
    is_whole: bool = False
    """Whether it repeats all of the answer, as a body does that is not streamed."""


def read_piece(value: Any) -> AnswerPiece:
    """Raises UpstreamFailed for what is no part of an answer."""
    if not isinstance(value, Mapping):
        raise UpstreamFailed("The upstream sent JSON that is not an object.")
    usage = _usage(value.get("usage")) or _usage(_mapping(value, "x_groq").get("usage"))
    choices = value.get("choices")
    choice = _first(choices)
    if choice is None:
        return AnswerPiece(usage=usage, choice=None)
    delta, message = choice.get("delta"), choice.get("message")
    is_whole = not isinstance(delta, Mapping) and isinstance(message, Mapping)
    said: Any = delta if isinstance(delta, Mapping) else message
    if not isinstance(said, Mapping):
        if said is not None:
            raise UpstreamFailed("The upstream sent a `delta` that is not an object.")
        said = {"content": choice.get("text")}
    text, thought = _content(said.get("content"))
    finish = choice.get("finish_reason")
    stop = choice.get("stop_reason")
    return AnswerPiece(
        text=text or _refusal(said),
        reasoning=reasoning_of(said) or thought,
        calls=tuple(_calls(said, are_whole=is_whole)),
        finish=_end(finish),
        stop=stop if isinstance(stop, str) else None,
        usage=usage or _usage(choice.get("usage")),
        logprobs=logprobs_of(choice),
        choice=_whole_number(choice.get("index")) or 0,
        has_others=isinstance(choices, list) and len(choices) > 1,
        details=tuple(_signed_details(said)),
        reasoning_field=next((name for name in REASONING if _is_text(said.get(name))), None),
        is_whole=is_whole,
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _signed_details(said: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    found = said.get("reasoning_details")
    for detail in found if isinstance(found, list) else ():
        if isinstance(detail, Mapping) and isinstance(detail.get("type"), str):
            yield detail


def _first(choices: Any) -> Mapping[str, Any] | None:
    """The first answer; None if there is none, as where only the usage is sent."""
    if isinstance(choices, Mapping):
        return choices
    if choices is None or choices == []:
        return None
    if not isinstance(choices, list):
        raise UpstreamFailed("The upstream sent `choices` that are not a list.")
    if not all(isinstance(choice, Mapping) for choice in choices):
        if choices == [None]:
            return None
        raise UpstreamFailed("The upstream sent a choice that is not an object.")
    found: list[Mapping[str, Any]] = choices
    return min(found, key=lambda choice: _whole_number(choice.get("index")) or 0)


def _end(finish: Any) -> str | None:
    if not isinstance(finish, str) or not finish:
        return None
    # some name the cause after it, as in `content_filter: SAFETY`
    reason = finish.lower().partition(":")[0].strip()
    return ENDS.get(reason, reason)


def _whole_number(value: Any) -> int | None:
    """A number, which some servers write as text or with a decimal point."""
    match value:
        case bool():
            return None
        case int():
            return value
        case float() if value.is_integer():
            return int(value)
        case str() if NUMBER.fullmatch(value):
            return int(value)
        case _:
            return None


def _content(content: Any) -> tuple[str, str]:
    """The text of a content, and the reasoning in it."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list):
        raise UpstreamFailed("The upstream sent a `content` that is not text.")
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping):
            (thoughts if part.get("type") in THOUGHTS else texts).append(_inside(part))
    return "".join(texts), "".join(thoughts)


def _inside(part: Mapping[str, Any]) -> str:
    """The text of a part, which may have parts itself."""
    for name in INSIDE:
        match part.get(name):
            case str(text) if text:
                return text
            case [*items]:
                return "".join(
                    item if isinstance(item, str) else _inside(item)
                    for item in items
                    if isinstance(item, str | Mapping)
                )
    return ""


def _refusal(said: Mapping[str, Any]) -> str:
    refusal = said.get("refusal")
    return refusal if isinstance(refusal, str) else ""


def reasoning_of(said: Mapping[str, Any]) -> str:
    """The reasoning of a message or a delta, from any field but its content."""
    for name in REASONING:
        match said.get(name):
            case str(text) if text:
                return text
            case Mapping() as found:
                return _inside(found)
            case None | "" | bool() | list():  # with a switch, some echo their settings
                continue
            case _:
                raise UpstreamFailed(f"The upstream sent a `{name}` that is not text.")
    return "".join(_details(said))


def _details(said: Mapping[str, Any]) -> Iterator[str]:
    for name in ("reasoning_details", "thinking_blocks", *REASONING):
        found = said.get(name)
        if isinstance(found, str | Mapping):
            found = [found]
        if isinstance(found, list):
            yield from (part if isinstance(part, str) else _inside(part) for part in _parts(found))
            return


def _parts(found: list[Any]) -> Iterator[str | Mapping[str, Any]]:
    return (part for part in found if isinstance(part, str | Mapping))


def _calls(said: Mapping[str, Any], *, are_whole: bool) -> Iterator[CallPiece]:
    """are_whole: whether each stands alone, however they are numbered."""
    found = said.get("tool_calls")
    if isinstance(found, Mapping):
        found = [found]
    if not found and isinstance(said.get("function_call"), Mapping):
        found = [{"index": 0, "function": said["function_call"]}]
    if found is None or found == "":
        return
    if not isinstance(found, list):
        raise UpstreamFailed("The upstream sent `tool_calls` that are not a list.")
    for position, call in enumerate(found):
        if not isinstance(call, Mapping):
            raise UpstreamFailed("The upstream sent a call that is not an object.")
        piece = _call(call)
        yield replace(piece, index=position) if are_whole else piece


def _call(call: Mapping[str, Any]) -> CallPiece:
    """A call, whose name and arguments are in `function` or next to it."""
    inside = call.get("function") or call.get("custom")
    function = inside if isinstance(inside, Mapping) else call
    name = function.get("name") or (inside if isinstance(inside, str) else "")
    arguments: Any = next(
        (function[key] for key in ("arguments", "parameters", "args", "input") if key in function),
        "",
    )
    index, id = call.get("index"), call.get("id") or call.get("call_id")
    if not isinstance(arguments, str | Mapping):  # no call has such, so that it becomes text
        arguments = "" if arguments is None else json.dumps(arguments)
    extra = call.get("extra_content")
    return CallPiece(
        index=_whole_number(index),
        extra_content=extra if isinstance(extra, Mapping) else {},
        is_misnumbered=index is not None and type(index) is not int,
        id=id if isinstance(id, str) else "",
        name=name if isinstance(name, str) else "",
        arguments=arguments,
    )


def _usage(usage: Any) -> UpstreamUsage | None:
    if not isinstance(usage, Mapping):
        return None
    prompt = _count(usage, "prompt_tokens", "input_tokens")
    completion = _count(usage, "completion_tokens", "output_tokens")
    if prompt is None and completion is None:
        return None
    details = _mapping(usage, "prompt_tokens_details", "input_tokens_details")
    thoughts = _mapping(usage, "completion_tokens_details", "output_tokens_details")
    cached = _count(details, "cached_tokens") or _count(usage, "prompt_cache_hit_tokens") or 0
    return UpstreamUsage(
        prompt,
        completion,
        min(cached, prompt or 0),
        _count(thoughts, "reasoning_tokens"),
        is_mistyped=any(isinstance(usage.get(name), str | float) for name in COUNTS),
    )


def _mapping(value: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return next((found for name in names if isinstance(found := value.get(name), Mapping)), {})


def _count(value: Mapping[str, Any], *names: str) -> int | None:
    found = (_whole_number(value.get(name)) for name in names)
    return next((n for n in found if n is not None and 0 <= n < MAX_TOKENS), None)
