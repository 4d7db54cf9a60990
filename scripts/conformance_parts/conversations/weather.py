"""The conversation that every client has: what is asked, the tool, and what should come of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

FAMILIES = ("qwen3", "gpt_oss")

CONNECTOR = "weather"
"""The same tool, on an MCP server that the model server has."""

QUESTIONS = ("What is the weather in Zürich and in Bern?", "And in Chur?")
ANSWERS = ("Zürich has 18 degrees, Bern has 16.", "Chur has 21 degrees.")
CITIES = ("Zürich", "Bern", "Chur")
PREAMBLE = "I look it up."
"""Of a family that says something before it calls."""

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
    """The tool, which remembers what it was asked."""

    asked: list[str] = field(default_factory=list)

    def __call__(self, city: str) -> str:
        self.asked.append(city)
        if len(self.asked) > len(CITIES):
            raise AssertionError(f"The tool was asked again and again: {self.asked}.")
        return f"{DEGREES[city]} degrees"


def check(asked: Sequence[str], answers: Sequence[str]) -> None:
    """answers: each turn's last text."""
    if list(asked) != list(CITIES):
        raise AssertionError(f"The tool was asked for {list(asked)}, not {list(CITIES)}.")
    if list(answers) != list(ANSWERS):
        raise AssertionError(f"The answers are {list(answers)}, not {list(ANSWERS)}.")


MOST = 16
"""Conversations that a client can have here."""


def model_of(family: str, client: str, number: int) -> str:
    """Which plays the answers to this one conversation, and to none next to it."""
    return f"{family}-{client}-{number}"
