"""Answers that a test gives to replay models, each for one request, in turn; and how secrets are
taken out of what is recorded, since transcripts are committed with tests."""

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from mlx_server import limits
from mlx_server.errors import NoRecording
from mlx_server.messages import Conversation
from mlx_server.requests import Prompt
from mlx_server.sources.transcript import Recording, TranscriptEntry, facts_of

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
            last = facts.last[0] if facts.last else ""
            shown = last if len(last) <= SHOWN else f"{last[: SHOWN - 3]}..."
            asked = f"the request for {model!r}, turn {facts.turn}, that ends with {shown!r}"
            if len(self._unanswered) < limits.UNANSWERED_REQUESTS:
                self._unanswered.append(asked)
        state = f"all {queue.given} answers are used" if queue.given else "no answer was given"
        raise NoRecording(
            f"The test has no answer to {asked}: {state} for this model. Give one more answer, or "
            "correct what the app asks.",
            param="messages" if isinstance(prompt, Conversation) else "prompt",
        )


REMOVED = "[removed]"

SECRET = re.compile(
    r"\b(?:sk|pk|rk)[-_][\w-]{16,}"  # OpenAI, Anthropic, OpenRouter, Stripe
    r"|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{30,}"
    r"|\bhf_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{30,}"
    r"|\bxox[abprs]-[\w-]{10,}"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"  # JSON web tokens
    r"|(?i:\bbearer) +[\w.~+/-]{15,}[\w~+/-]=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----).)*-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
"""Keys in the forms that their makers gave them so that they can be found."""


def without_secrets(data: Any, known: Collection[str] = ()) -> Any:
    """The data with each secret in its texts as `REMOVED`. known: secrets of any form."""
    match data:
        case str():
            return REMOVED.join(_around(data, known))
        case dict():
            return {
                without_secrets(name, known): without_secrets(value, known)
                for name, value in data.items()
            }
        case list() | tuple():
            return [without_secrets(item, known) for item in data]
    return data


def matching(text: str, known: Collection[str] = ()) -> str:
    """A transcript's `match` for this text, whatever stands in the places of its secrets. Each but
    the last ends where the text after it first occurs, so that many take no more time than one."""
    first, *middle = map(re.escape, _around(text, known))
    if not middle:
        return text
    skipped = "".join(f"(?>.+?{piece})" for piece in middle[:-1])
    return f"regex:(?s)^{first}{skipped}.+{middle[-1]}\\s*$"


def _around(text: str, known: Collection[str]) -> Iterator[str]:
    """The pieces of a text before, between and after its secrets."""
    own = [re.escape(secret) for secret in known if secret]
    at = 0
    for secret in re.finditer("|".join([*own, SECRET.pattern]), text, re.DOTALL):
        yield text[at : secret.start()]
        at = secret.end()
    yield text[at:]
