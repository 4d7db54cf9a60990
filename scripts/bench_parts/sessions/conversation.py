"""An agent's session, as its client sends it: the whole conversation with every request.

The words are made up, the shape is that of coding agents: a long system prompt, tools, rounds of
calls whose results are read, reasoning that the client sends back and the template drops from
earlier turns. Each server gets the same requests: the last answer of a turn is forced word by word,
with a few tokens of reasoning before it, and other answers of the model are not used.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

Json = dict[str, Any]

WORDS = ["file", "line", "test", "error", "value", "read", "write", "call", "name", "path", "code"]

TOOLS = ("read_file", "write_file", "run_tests", "search", "list_files", "git_log")

SYSTEM_WORDS, RESULT_WORDS, ANSWER_WORDS = 900, (40, 200), (20, 60)
TURNS, ROUNDS = 8, 3

THOUGHT_TOKENS, ANSWER_TOKENS = 16, 160


class SyntheticSession:
    def __init__(
        self, seed: int, rounds: int = ROUNDS, answer_words: tuple[int, int] = ANSWER_WORDS
    ) -> None:
        self._random = Random(seed)  # noqa: S311
        # sessions of one agent have the same system prompt
        shared = Random(0)  # noqa: S311
        system = {"role": "system", "content": _words(shared, SYSTEM_WORDS)}
        self.messages: list[Json] = [system]
        self._rounds, self._answer_words = rounds, answer_words
        self.tools = [_tool(shared, name) for name in TOOLS]

    def requests(self, turns: int = TURNS) -> Iterator[Json]:
        """Yields the body of each request. Another session's requests may come between."""
        for turn in range(turns):
            self._add(role="user", content=self._words(10, 60))
            for round in range(self._rounds):
                yield self._body()
                self._call(f"call_{turn}_{round}")
            answer = self._words(*self._answer_words)
            yield {**self._body(), **word_by_word(answer, has_tools=True)}
            self._add(role="assistant", content=answer, **self._thought())

    def _body(self) -> Json:
        return {"messages": list(self.messages), "tools": self.tools}

    def _call(self, id: str) -> None:
        function = {"name": self._random.choice(TOOLS), "arguments": '{"path": "src/main.py"}'}
        call = {"id": id, "type": "function", "function": function}
        self._add(role="assistant", content="", tool_calls=[call], **self._thought())
        self._add(role="tool", tool_call_id=id, content=self._words(*RESULT_WORDS))

    def _thought(self) -> Json:
        return {"reasoning_content": self._words(20, 80)}

    def _add(self, **message: Any) -> None:
        self.messages.append(message)

    def _words(self, least: int, most: int) -> str:
        return _words(self._random, self._random.randint(least, most))


def word_by_word(answer: str, *, has_tools: bool) -> Json:
    return {
        "structured_outputs": {"grammar": f"start: {json.dumps(answer)}"},
        **({"tool_choice": "none"} if has_tools else {}),
        "thinking_budget": THOUGHT_TOKENS,
        "max_tokens": ANSWER_TOKENS,
    }


def _words(random: Random, count: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(count))


def _tool(random: Random, name: str) -> Json:
    path = {"type": "string", "description": _words(random, 12)}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    function = {"name": name, "description": _words(random, 40), "parameters": parameters}
    return {"type": "function", "function": function}


def is_last_of_turn(body: Json) -> bool:
    return "structured_outputs" in body


def alone(turns: int = TURNS) -> Iterator[Json]:
    yield from SyntheticSession(1).requests(turns)


def two_agents(
    turns: int = TURNS, rounds: int = ROUNDS, answer_words: tuple[int, int] = ANSWER_WORDS
) -> Iterator[Json]:
    """Yields the requests of two sessions with one system prompt, in turns."""
    sessions = (SyntheticSession(seed, rounds, answer_words) for seed in (1, 2))
    first, second = (session.requests(turns) for session in sessions)
    for pair in zip(first, second, strict=True):
        yield from pair


def two_chats(turns: int = TURNS) -> Iterator[Json]:
    """Yields the requests of two sessions without calls, so that each prompt drops the reasoning of
    the answer before."""
    yield from two_agents(turns, rounds=0)


SCENARIOS = {"one agent": alone, "two agents": two_agents, "two chats": two_chats}
