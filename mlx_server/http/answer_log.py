"""What the page shows of answers, under way and ended: times and counts, and texts only where the
server's owner wants them."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mlx_server import limits
from mlx_server.errors import ServerError
from mlx_server.events import Answer, Started, TokenCounts, total
from mlx_server.messages import Conversation
from mlx_server.requests import Infill, Prompt
from mlx_server.system.logs import RequestLogContext, request_context


@dataclass(eq=False)
class AnswerRecord:
    """The numbers of one request."""

    client: str
    """See `GenerateRequest.client`."""
    turn: RequestLogContext
    at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)
    started: Started | None = None
    model: str = ""
    first_at: float | None = None
    """The time of its first text or call."""
    ended_at: float | None = None
    prompt_tokens: int = 0
    finished: TokenCounts = field(default_factory=TokenCounts)
    """The tokens of the answers that have ended."""
    repairs: int = 0
    finish: str = "cancelled"
    prompt: Prompt | None = None
    """The first prompt, if texts are listed."""
    answer: Answer | None = None
    """The first answer to it."""

    @property
    def counts(self) -> TokenCounts:
        return total((self.finished, self.started.unfinished())) if self.started else self.finished

    def running(self) -> dict[str, Any]:
        counts = self.counts
        rows = self.started.rows() if self.started else None
        return {
            "model": self.model or self.turn.model or "",
            "state": self._state(),
            "at": self.at,
            "seconds": self._seconds(self.began),
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": rows.computed_tokens if rows else 0,
            "completion_tokens": counts.completion_tokens,
            "tokens_per_second": self._speed(counts),
        }

    def ended(self) -> dict[str, Any]:
        per_pass = self.finished.tokens_per_pass
        return {
            "at": self.at,
            "model": self.model or self.turn.model or "",
            "seconds": self._seconds(self.began),
            "first_token_seconds": self.first_at and round(self.first_at - self.began, 3),
            "prompt_tokens": self.prompt_tokens + self.finished.further_prompt_tokens,
            "cached_tokens": self.finished.cached_tokens,
            "completion_tokens": self.finished.completion_tokens,
            "tokens_per_second": self._speed(self.finished),
            "tokens_per_pass": per_pass and round(per_pass, 2),
            "finish": self.finish,
            "repairs": self.repairs,
            **self._texts(),
        }

    def _texts(self) -> dict[str, Any]:
        """What the request asked and what it was answered, as far as the page lists it."""
        if self.prompt is None or self.answer is None:
            return {}
        calls = (
            f"{call.name} {''.join(call.arguments)}" for call in self.answer.begun_calls.values()
        )
        texts = {
            "asked": _last_of(self.prompt),
            "thoughts": self.answer.thoughts,
            "answer": self.answer.text,
            "calls": "\n".join(calls),
        }
        return {"texts": {name: text[: limits.LISTED_TEXT] for name, text in texts.items()}}

    def _state(self) -> str:
        if self.started is None:
            return "waiting"
        return "answer" if self._decoding_since() else "prompt"

    def _seconds(self, since: float) -> float:
        return round((self.ended_at or time.perf_counter()) - since, 3)

    def _decoding_since(self) -> float | None:
        return (self.started.rows().decoding_since if self.started else None) or self.first_at

    def _speed(self, counts: TokenCounts) -> float | None:
        """The first token is the prompt's work."""
        since = self._decoding_since()
        seconds = self._seconds(since) if since else 0.0
        further = counts.completion_tokens - 1
        return round(further / seconds, 1) if further > 0 and seconds > 0 else None


class AnswerLog:
    def __init__(self) -> None:
        self._running: dict[AnswerRecord, None] = {}
        self._ended: deque[tuple[str, dict[str, Any]]] = deque(maxlen=limits.LISTED_ANSWERS)
        """By their clients."""
        self.keeps_texts = False
        """Whether ended requests are listed with their texts."""
        self.totals = {"ended": 0, "prompt_tokens": 0, "cached_tokens": 0}
        """Requests and prompt tokens since the start, and those of them found in the cache."""

    @contextmanager
    def record(self, client: str, prompts: Sequence[Prompt] = ()) -> Iterator[AnswerRecord]:
        turn = request_context.get() or RequestLogContext("")
        record = AnswerRecord(client, turn)
        if self.keeps_texts and prompts:
            record.prompt, record.answer = prompts[0], Answer()
        self._running[record] = None
        try:
            yield record
        except ServerError as error:
            record.finish = error.code or error.type
            raise
        except Exception:
            record.finish = "internal_error"
            raise
        finally:
            del self._running[record]
            record.ended_at = time.perf_counter()
            ended = record.ended()
            self._ended.appendleft((client, ended))
            self.totals["ended"] += 1
            if record.started:
                self.totals["prompt_tokens"] += ended["prompt_tokens"]
                self.totals["cached_tokens"] += ended["cached_tokens"]

    def running(self, client: str | None) -> list[dict[str, Any]]:
        """The answers under way of one client, in order of arrival; None means all clients."""
        return [each.running() for each in self._running if client in (None, each.client)]

    def ended(self, client: str | None) -> list[dict[str, Any]]:
        """The latest first."""
        return [ended for owner, ended in self._ended if client in (None, owner)]


def _last_of(prompt: Prompt) -> str:
    match prompt:
        case Conversation(messages):
            return messages[-1].content if messages else ""
        case str():
            return prompt
        case Infill(prefix):
            return prefix
        case _:
            return f"{len(prompt)} token ids"
