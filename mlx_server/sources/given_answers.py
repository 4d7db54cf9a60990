"""Answers that a test gives to replay models: each answers one request, in turn."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock

from mlx_server import limits
from mlx_server.errors import NoRecording
from mlx_server.messages import Conversation
from mlx_server.requests import Prompt
from mlx_server.sources.transcript import Recording, RequestFacts, TranscriptEntry, facts_of

SHOWN = 80
"""Characters of a message that are shown."""


@dataclass
class _Queue:
    given: int = 0
    entries: deque[TranscriptEntry] = field(default_factory=deque)


class GivenAnswers:
    """The answers of all replay models, by the model's name in the request."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._unanswered: list[str] = []
        self._lock = Lock()

    def add(self, model: str, entries: Iterable[TranscriptEntry]) -> None:
        with self._lock:
            queue = self._queues.setdefault(model, _Queue())
            before = len(queue.entries)
            queue.entries.extend(entries)
            queue.given += len(queue.entries) - before

    def reset(self) -> None:
        with self._lock:
            self._queues.clear()
            self._unanswered.clear()

    @property
    def left(self) -> dict[str, int]:
        """How many answers are left, of the models that have any."""
        with self._lock:
            return {name: len(q.entries) for name, q in self._queues.items() if q.entries}

    @property
    def unanswered(self) -> list[str]:
        """The requests for which there was no answer."""
        with self._lock:
            return list(self._unanswered)

    def pick(self, prompt: Prompt, models: tuple[str, ...] = ()) -> Recording:
        facts, model = facts_of(prompt, models), models[0]
        with self._lock:
            queue = self._queues.get(model, _Queue())
            if queue.entries:
                number = queue.given - len(queue.entries) + 1
                return Recording(queue.entries.popleft(), f"answer {number} given for {model}")
            asked = _words(facts, model)
            if len(self._unanswered) < limits.UNANSWERED_REQUESTS:
                self._unanswered.append(asked)
        given = f"all {queue.given} answers are used" if queue.given else "no answer was given"
        raise NoRecording(
            f"The test has no answer to {asked}: {given} for this model. Give one more answer, or "
            "correct what the app asks.",
            param="messages" if isinstance(prompt, Conversation) else "prompt",
        )


def _words(facts: RequestFacts, model: str) -> str:
    last = facts.last[0] if facts.last else ""
    shown = last if len(last) <= SHOWN else f"{last[: SHOWN - 3]}..."
    return f"the request for {model!r}, turn {facts.turn}, that ends with {shown!r}"
