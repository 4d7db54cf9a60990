"""Finds the text, the reasoning and the calls in a message's content, whatever its form."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_server.errors import UpstreamFailed

REASONING = (
    *("reasoning_content", "reasoning", "thinking", "reasoning_text", "thought", "thoughts"),
    *("thinking_content", "reasoningContent", "thinkingContent", "reasoning_output", "cot"),
    *("thought_process", "chain_of_thought", "analysis"),
)
"""Fields of a message that may have its reasoning. If there are several, they have the same one."""

GATEWAY_FIELDS = ("provider_specific_fields", "model_extra")
"""Fields into which gateways move the fields of a message that they don't know."""

DETAILS = ("reasoning_details", "thinking_blocks")

FIELDS = frozenset((*REASONING, *GATEWAY_FIELDS, *DETAILS))

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
    for name in (*DETAILS, *REASONING):
        found = said.get(name)
        if isinstance(found, str | Mapping):
            found = [found]
        if isinstance(found, list):
            for part in _text_parts(found):
                yield part if isinstance(part, str) else part_text(part)
            return


def _text_parts(found: list[Any]) -> Iterator[str | Mapping[str, Any]]:
    return (part for part in found if isinstance(part, str | Mapping))
