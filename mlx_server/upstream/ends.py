"""Why an answer ended, in OpenAI's words."""

import re
from collections.abc import Mapping
from typing import Any

ENDS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("end", "end_turn", "end_of_turn", "end_of_text", "eos", "eos_token", "eos_token_id"),
            *("stop_sequence", "stop_token", "stop_word", "stop_words", "stop_string", "normal"),
            *("complete", "completed", "done", "finish", "finished", "success", "no_more_tokens"),
        ),
        "stop",
    ),
    **dict.fromkeys(
        ("model_length", "time_limit", "limit", "incomplete", "truncated", "truncation"), "length"
    ),
    **dict.fromkeys(
        ("function_call", "function_calls", "tool_use", "tool_call", "tools"), "tool_calls"
    ),
    **dict.fromkeys(
        ("cancelled", "abort", "aborted", "network_error", "insufficient_system_resource"), "error"
    ),
    **dict.fromkeys(
        ("safety", "recitation", "sensitive", "filtered", "blocked", "moderation"), "content_filter"
    ),
}
"""Other servers' names for OpenAI's reasons."""

LIMITS = re.compile(
    r"max_\w*(token|length)|(context|token|output|max)_(length|limit|window)|length_"
)
"""Matches the names of limits."""

PREFIX = re.compile(r"finish_?reason[._]|^reason[._]")

NOTHING = ("", "null", "none", "unspecified")
"""Words for no reason, in pieces before the last one."""

NAMES = ("finish_reason", "finishReason", "done_reason")


def reason_of_end(*places: Mapping[str, Any]) -> str | None:
    """The reason that the first of these objects gives, which is OpenAI's where it is known."""
    for place in places:
        for name in NAMES:
            if (found := place.get(name)) and (reason := _reason(found)):
                return reason
    # vLLM names a stop string so, next to the reason
    stop = places[0].get("stop_reason") if places else None
    reason = _reason(stop) if isinstance(stop, str) else None
    return reason if reason in ENDS.values() else None


def _reason(found: Any) -> str | None:
    if isinstance(found, Mapping):
        found = found.get("type") or found.get("reason")
    if not isinstance(found, str):
        return None
    # some name the cause after it, as in `content_filter: SAFETY`
    said = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found.partition(":")[0].strip())
    reason = PREFIX.sub("", said.lower().replace("-", "_"))
    if reason in NOTHING:
        return None
    if reason.startswith("<") and reason.endswith(">"):  # the token that ended it
        return "stop"
    if known := ENDS.get(reason):
        return known
    return "length" if LIMITS.search(reason) else reason
