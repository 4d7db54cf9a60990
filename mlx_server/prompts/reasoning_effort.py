"""Applies `reasoning_effort` with what a chat template has for thinking: a switch, a word in the
system message, or efforts of its own."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mlx_server.messages import Message

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""OpenAI's words, from the least effort to the most."""


def _by_effort(*values: Any) -> dict[str, Any]:
    return dict(zip(EFFORTS, values, strict=True))


ON = _by_effort(False, *[True] * 6)

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "enable_thinking": ON,
    "thinking": ON,
    "reasoning": ON,
    "thinking_mode": _by_effort("disabled", *["enabled"] * 6),
    "thinking_effort": _by_effort("low", "low", "low", "medium", "high", "max", "max"),
    "thinking_budget": _by_effort(0, 512, 1024, 4096, 16384, -1, -1),
    "low_effort": _by_effort(False, True, True, False, False, False, False),
    "medium_effort": _by_effort(False, False, False, True, False, False, False),
}
"""Variables that a template may read, with their value for each effort."""

WORDS = _by_effort("/no_think", *["/think"] * 6)
"""Words in the system message, for templates that look for them instead of a switch."""

_COMPARED = re.compile(
    r"\breasoning_effort\s*(?:[!=]=\s*(?P<one>'\w+'|\"\w+\")|(?:not\s+)?in\s*[\[(](?P<any>[^\])]*))"
)
"""Matches where a template compares the effort with words."""


def efforts_to_try(effort: object, template: str) -> list[object]:
    """Returns the values to pass to the template, best first: the next ones are for a template that
    refuses the first. A word beyond those that the template knows becomes the nearest one of
    them."""
    if effort not in EFFORTS:
        return [effort]
    rank = EFFORTS.index(effort)
    known = [EFFORTS.index(word) for word in _compared(template)]
    best = rank
    if known and rank > max(known):
        best = max(known)
    elif len(known) > 1 and 0 < rank < min(known):
        best = min(known)
    nearest = sorted(range(1, len(EFFORTS)), key=lambda other: (abs(other - rank), -other))
    return [EFFORTS[i] for i in dict.fromkeys([best, *nearest])]


def _compared(template: str) -> set[str]:
    """Returns the words with an effect of their own. Those that are listed together with "none"
    turn thinking off, so none of them is the nearest of a word that should turn it on."""
    found = _COMPARED.finditer(template)
    lists = [set(re.findall(r"\w+", each["one"] or each["any"])) for each in found]
    return set().union(*(words for words in lists if "none" not in words)) & set(EFFORTS)


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
