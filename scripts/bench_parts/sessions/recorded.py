"""Sessions that real clients had, recorded by `scripts/conformance`, without their words.

An answer that consists of words and is in the history of a later request is forced word by word, as
in the synthetic sessions.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench_parts.sessions.conversation import TURNS, word_by_word

Json = dict[str, Any]

RECORDINGS = Path(__file__).parent / "recordings"


def session(file: Path, turns: int = TURNS) -> Iterator[Json]:
    """Yields the bodies of a session's requests, until so many turns or the session have ended."""
    kept = json.loads(file.read_text("utf-8"))
    histories = [request["messages"] for request in kept["requests"]]
    ended = 0
    for request in kept["requests"]:
        messages = [kept["messages"][number] for number in request["messages"]]
        tools = kept["tools"][request["tools"]]
        body: Json = {"messages": messages} | ({"tools": tools} if tools else {})
        answer = _answer(request["messages"], histories, kept["messages"])
        yield body | (word_by_word(answer, has_tools=bool(tools)) if answer else {})
        ended += bool(answer)
        if ended == turns:
            return


def _answer(asked: list[int], histories: Sequence[list[int]], messages: Sequence[Json]) -> str:
    """Returns the answer to a request, if it is words alone."""
    for history in histories:
        if len(history) > len(asked) and history[: len(asked)] == asked:
            answer = messages[history[len(asked)]]
            if answer["role"] == "assistant" and not answer.get("tool_calls"):
                return str(answer["content"])
    return ""


RECORDED: dict[str, Callable[[int], Iterator[Json]]] = {
    file.stem: partial(session, file) for file in sorted(RECORDINGS.glob("*.json"))
}


AT_ONCE = ("claude-code", "codex")


def in_turns(turns: int = TURNS) -> Iterator[Json]:
    """Yields two sessions' requests in turns, as from several agents of one person."""
    for bodies in zip_longest(*(RECORDED[name](turns) for name in AT_ONCE)):
        yield from filter(None, bodies)


SESSIONS = {**RECORDED, " and ".join(AT_ONCE): in_turns}
