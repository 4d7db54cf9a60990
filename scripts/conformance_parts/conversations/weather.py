"""The conversation that every client has: its questions, its tool, and checks of its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)

FAMILIES = ("qwen3", "gpt_oss")

CONNECTOR = "weather"
"""The name of an MCP server with the same tool that the model server knows."""

QUESTIONS = ("What is the weather in Zürich and in Bern?", "And in Chur?")
ANSWERS = ("Zürich has 18 degrees, Bern has 16.", "Chur has 21 degrees.")
CITIES = ("Zürich", "Bern", "Chur")
PREAMBLE = "I look it up."
"""The text of a family that says something before it calls."""

DEGREES = {"Zürich": 18, "Bern": 16, "Chur": 21}

NAME, DESCRIPTION = "get_weather", "The weather in a city"
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass
class Weather:
    """The tool, which remembers the cities for which it was called."""

    asked: list[str] = field(default_factory=list)

    def __call__(self, city: str) -> str:
        self.asked.append(city)
        if len(self.asked) > len(CITIES):
            raise AssertionError(f"The tool was asked again and again: {self.asked}.")
        return f"{DEGREES[city]} degrees"


def check(asked: Sequence[str], answers: Sequence[str]) -> None:
    """answers: the last text of each turn."""
    if list(asked) != list(CITIES):
        raise AssertionError(f"The tool was asked for {list(asked)}, not {list(CITIES)}.")
    if list(answers) != list(ANSWERS):
        raise AssertionError(f"The answers are {list(answers)}, not {list(ANSWERS)}.")


MOST = 16
"""The most conversations of one client."""


def model_of(family: str, client: str, number: int) -> str:
    """Returns the replay model that plays the answers to this conversation and to no other."""
    return f"{family}-{client}-{number}"


TOO_LONG = "word " * 20_000
"""A prompt that exceeds the context of the demo model."""
LONG = "The weather of the whole year, day by day. " * 20
UNREPEATED = 64
"""The most tokens at the end of a prompt that the next one does not repeat."""


def check_cached(cached: int, before: int) -> None:
    """before: the number of tokens of the previous prompt."""
    assert cached >= before - UNREPEATED, f"{cached} tokens are cached of {before}"


def refusal(kind: type[E], ask: Callable[..., object], *given: Any) -> E:
    """Returns the error that a call raises."""
    try:
        ask(*given)
    except kind as error:
        return error
    raise AssertionError("There was no error.")
