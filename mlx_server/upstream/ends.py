"""Maps other servers' reasons for the end of an answer to OpenAI's `finish_reason`."""

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
"""Other servers' names of reasons, and OpenAI's."""

LIMITS = re.compile(
    r"max_\w*(token|length)|(context|token|output|max)_(length|limit|window)|length_"
)
"""Matches reasons that name a limit, which mean `length`."""

PREFIX = re.compile(r"finish_?reason[._]|^reason[._]")

LONGEST_NAME = 100
"""The characters of a reason that are read."""

NO_REASON = ("", "null", "none", "unspecified")
"""Values that mean that the answer has not ended, in all pieces but the last."""

NAMES = ("finish_reason", "finishReason", "done_reason")


def reason_of_end(*places: Mapping[str, Any]) -> str | None:
    """The reason in the first of these objects that has one, as OpenAI's if it is known, else as
    the upstream names it; None if there is none."""
    for place in places:
        for name in NAMES:
            if (found := place.get(name)) and (reason := _reason(found)):
                return reason
    # vLLM's `stop_reason` is a stop string, so it is used only if it is a known reason
    stop = places[0].get("stop_reason") if places else None
    reason = _reason(stop) if isinstance(stop, str) else None
    return reason if reason in ENDS.values() else None


def _reason(found: Any) -> str | None:
    if isinstance(found, Mapping):
        found = found.get("type") or found.get("reason")
    if not isinstance(found, str):
        return None
    # some servers add the cause, as in `content_filter: SAFETY`
    name = found[:LONGEST_NAME].partition(":")[0].strip()
    said = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    reason = PREFIX.sub("", said.lower().replace("-", "_"))
    if reason in NO_REASON:
        return None
    if reason.startswith("<") and reason.endswith(">"):  # the stop token
        return "stop"
    if known := ENDS.get(reason):
        return known
    return "length" if LIMITS.search(reason) else reason
