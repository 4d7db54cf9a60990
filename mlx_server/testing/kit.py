"""The object that the fixture `mlx_replay` gives to a test."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_server.testing.scripted import ScriptedAnswer

if TYPE_CHECKING:
    from openai import OpenAI

    from mlx_server.testing.server import TestRunServer


@dataclass(frozen=True)
class AskedRequest:
    path: str
    """The path of the request, such as `/v1/chat/completions`."""
    body: dict[str, Any]


class MlxReplay:
    """The server of the test run, during one test."""

    def __init__(self, server: "TestRunServer") -> None:
        self._server = server

    @property
    def url(self) -> str:
        """The server's address, as Anthropic's and Ollama's clients want it."""
        return self._server.url

    @property
    def base_url(self) -> str:
        """The same as OpenAI's clients want it; they take any API key."""
        return f"{self.url}/v1"

    @property
    def client(self) -> "OpenAI":
        """A client of the `openai` package, which must be installed."""
        return self._server.openai()

    def answers(
        self,
        family: str,
        answers: Iterable[ScriptedAnswer],
        *,
        model: str | None = None,
        delay_ms: float = 0,
    ) -> str:
        """Gives answers to the next requests, one to each, in turn, after those given before.

        family: how the model writes, such as `gpt_oss`. model: the name by which the app asks for
        it; by default the family's. delay_ms: the delay before each further token. Returns the
        model's name. Raises ValueError for an answer that the family can't write.
        """
        __tracebackhide__ = True  # pytest shows the test's line
        given = list(answers)
        for each in given:
            if not isinstance(each, ScriptedAnswer):
                raise TypeError(
                    f"{each!r} is not an answer. Write it as say(...), think(...), call(...), "
                    "raw(...) or tokens(...)."
                )
        body = {
            "family": family,
            "model": model,
            "answers": [each.wire() for each in given],
            "delay_ms": delay_ms,
        }
        return str(self._server.door("POST", body)["model"])

    @property
    def requests(self) -> list[AskedRequest]:
        """The requests of this test to the server, in order."""
        found = self._server.door("GET")["requests"]
        return [AskedRequest(each["path"], _parsed(each["body"])) for each in found]

    def problems(self) -> list[str]:
        """The requests that had no answer, and the answers that no request used."""
        found = self._server.door("GET")
        unanswered = [f"There was no answer to {asked}." for asked in found["unanswered"]]
        unused = [
            f"{_count(count, 'answer')} of {name!r} {'was' if count == 1 else 'were'} not used."
            for name, count in found["left"].items()
        ]
        return [*unanswered, *unused]

    def check(self) -> None:
        """Fails unless every request had an answer and every answer was used, as the plugin does
        at the end of each test."""
        problems = self.problems()
        assert not problems, " ".join(problems)


def _parsed(body: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
