"""Applies `reasoning_effort` with the switch that a chat template has for thinking."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mlx_server.messages import Message

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def _by_effort(*values: Any) -> dict[str, Any]:
    return dict(zip(EFFORTS, values, strict=True))


ON = _by_effort(False, True, True, True, True, True)

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "enable_thinking": ON,
    "thinking": ON,
    "reasoning": ON,
    "thinking_mode": _by_effort("disabled", *["enabled"] * 5),
    "thinking_effort": _by_effort("low", "low", "low", "medium", "high", "max"),
    "thinking_budget": _by_effort(0, 512, 1024, 4096, 16384, -1),
    "low_effort": _by_effort(False, True, True, False, False, False),
    "medium_effort": _by_effort(False, False, False, True, False, False),
}
"""Variables that a template may read, with their value for each effort."""

WORDS = _by_effort("/no_think", *["/think"] * 5)
"""Words in the system message, for templates that look for them instead of a switch."""


def switches(kwargs: Mapping[str, Any], takes: Callable[[str], bool]) -> dict[str, Any]:
    effort = kwargs.get("reasoning_effort")
    return {
        name: values[effort]
        for name, values in SWITCHES.items()
        if isinstance(effort, str) and effort in values and takes(name)
    }


def effort_word(kwargs: Mapping[str, Any], template: str) -> str:
    effort = kwargs.get("reasoning_effort")
    has_words = WORDS["none"] in template
    return WORDS.get(effort, "") if has_words and isinstance(effort, str) else ""


def with_effort_word(messages: tuple[Message, ...], word: str) -> tuple[Message, ...]:
    if messages and messages[0].role in ("system", "developer"):
        first, rest = messages[0], messages[1:]
        return (replace(first, content=f"{first.content} {word}".lstrip()), *rest)
    return (Message("system", word), *messages)
