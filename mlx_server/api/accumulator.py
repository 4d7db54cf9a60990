"""Collects the events of a request: the answers, their usage, repairs and violations."""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from mlx_server import limits
from mlx_server.errors import BadRequest
from mlx_server.events import (
    Answer,
    Event,
    Finished,
    PromptProgress,
    Started,
    TextDelta,
    TokenCounts,
    TokenLogprob,
    total,
)
from mlx_server.requests import Tier

Wire = dict[str, Any]


def arguments_object(text: str) -> dict[str, Any]:
    """Empty for a call that was cut off. Halves of surrogate pairs, which a model may write as
    escapes, are no text that could be sent, and are replaced."""
    try:
        arguments = json.loads(text or "{}")
        arguments = json.loads(json.dumps(arguments, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


class Timing:
    """The nanoseconds of each phase; the clock starts when the request has been read."""

    def __init__(self) -> None:
        self._began = self._loaded = self._answered = time.perf_counter_ns()
        self._has_answered = False

    def note(self, event: Event) -> None:
        if self._has_answered or isinstance(event, PromptProgress):
            return
        self._answered = time.perf_counter_ns()
        if isinstance(event, Started):
            self._loaded = self._answered
        else:
            self._has_answered = True

    def durations(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """Ollama's, of an answer that has ended."""
        ended = time.perf_counter_ns()
        return {
            "total_duration": ended - self._began,
            "load_duration": self._loaded - self._began,
            "prompt_eval_count": prompt_tokens,
            "prompt_eval_duration": self._answered - self._loaded,
            "eval_count": tokens,
            "eval_duration": ended - self._answered,
        }

    def timings(self, prompt_tokens: int, cached: int, tokens: int) -> dict[str, Any]:
        """llama.cpp's `timings`. Those of the answers begin with their first token."""
        now = time.perf_counter_ns()
        computed = max(0, prompt_tokens - cached)
        return {
            "cache_n": cached,
            **_speed("prompt", computed, self._answered - self._loaded),
            **_speed("predicted", tokens, now - self._answered),
        }


def _speed(name: str, tokens: int, nanoseconds: int) -> dict[str, Any]:
    milliseconds = nanoseconds / 1e6
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(milliseconds, 3),
        f"{name}_per_token_ms": round(milliseconds / tokens, 3) if tokens else 0.0,
        f"{name}_per_second": round(1000 * tokens / milliseconds, 3) if milliseconds else 0.0,
    }


def prompt_progress(event: PromptProgress, seconds: float) -> dict[str, Any]:
    """A chunk's `prompt_progress` as llama.cpp's server names it. `seconds`: since the request."""
    return {
        "prompt_progress": {
            "total": event.total,
            "cache": event.cached,
            "processed": event.computed,
            "time_ms": round(1000 * seconds),
        }
    }


class KeptLogprobs:
    """Counts the log probabilities that are held until a response is whole."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        self._count += sum(1 + len(token.top) for token in tokens)
        if self._count > limits.KEPT_LOGPROBS:
            raise BadRequest(
                f"The response has more than {limits.KEPT_LOGPROBS:,} log probabilities. Ask for "
                "fewer alternatives or tokens, or stream a completion that is not stored.",
                param="logprobs",
            )


def prediction_tokens(counts: TokenCounts) -> dict[str, int]:
    """The members of a usage's details that say how drafts fared."""
    return {
        "accepted_prediction_tokens": counts.accepted_draft_tokens,
        "rejected_prediction_tokens": counts.rejected_draft_tokens,
    }


def logprob_json(token: TokenLogprob) -> msgspec.Raw:
    """The log probabilities of a token and of its alternatives, as most APIs have them."""
    tops = [_logprob(top) for top in token.top]
    return msgspec.Raw(msgspec.json.encode({**_logprob(token), "top_logprobs": tops}))


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}


BATCH = Tier.BATCH.label


def openai_tier(tier: str | None) -> str | None:
    """OpenAI's name of a tier: it has none for that of a batch."""
    return None if tier == BATCH else tier


class Accumulator:
    def __init__(
        self,
        model: str,
        prompts: int,
        n: int,
        *,
        keeps_logprobs: bool = False,
        write_logprobs: Callable[[TokenLogprob], object] = logprob_json,
    ) -> None:
        """keeps_logprobs: whether log probabilities are collected, which a stream's chunks have had
        already. They are written at once: together, a million would keep the event loop for
        seconds."""
        self.model = model
        self.fingerprint: str | None = None
        self.service_tier: str | None = None
        self.answers = [Answer() for _ in range(prompts * n)]
        self.logprobs: list[list[Any]] = [[] for _ in self.answers]
        """The log probabilities of each answer as they are written, if they are collected."""
        self._kept_logprobs = KeptLogprobs() if keeps_logprobs else None
        self._write_logprobs = write_logprobs
        self._n = n
        self.timing = Timing()
        self.prompt_tokens = self.estimated_prompt_tokens = self._tool_output_tokens = 0
        self._unenforced: Sequence[str] = ()
        self._normalized: Sequence[str] = ()

    def add(self, event: Event) -> None:
        self.timing.note(event)
        match event:
            case Started():
                self.model = event.model
                self.fingerprint, self.service_tier = event.fingerprint, event.service_tier
                self.prompt_tokens = event.prompt_tokens
                self.estimated_prompt_tokens = event.estimated_prompt_tokens
                self._tool_output_tokens = event.tool_output_tokens
                self._unenforced = event.unenforced
                self._normalized = event.normalized
                return
            case TextDelta() if self._kept_logprobs:
                self._kept_logprobs.add(event.logprobs)
                self.logprobs[event.index] += map(self._write_logprobs, event.logprobs)
            case Finished():
                self.prompt_tokens += event.counts.further_prompt_tokens
                self._tool_output_tokens += event.counts.further_tool_output_tokens
        self.answers[event.index].add(event)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`. A prompt and its cached tokens count once, also with `n` answers."""
        cached = sum(answer.counts.cached_tokens for answer in self.answers[:: self._n])
        counts = total(answer.counts for answer in self.answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
            "total_tokens": self.prompt_tokens + counts.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": cached,
                **self.tool_output_tokens(),
            },
            "completion_tokens_details": {
                "reasoning_tokens": counts.reasoning_tokens,
                **prediction_tokens(counts),
            },
        }

    def tool_output_tokens(self) -> dict[str, int]:
        """The member of a usage's details, which OpenAI's does not have; empty without tool
        results."""
        count = self._tool_output_tokens
        return {"tool_output_tokens": count} if count else {}

    def timings(self) -> dict[str, Any]:
        """llama.cpp's `timings` of all answers together."""
        counts = total(answer.counts for answer in self.answers)
        cached = sum(answer.counts.cached_tokens for answer in self.answers[:: self._n])
        timings = self.timing.timings(self.prompt_tokens, cached, counts.completion_tokens)
        accepted = counts.accepted_draft_tokens
        if drafted := accepted + counts.rejected_draft_tokens:
            timings |= {"draft_n": drafted, "draft_n_accepted": accepted}
        return {"timings": timings}

    def warnings(self, *answers: Answer, ignored: Sequence[str] = ()) -> dict[str, Any]:
        raw = [
            {"index": index, "text": text}
            for index, each in enumerate(self.answers)
            if each in answers
            for text in each.raw
        ]
        more = {"ignored": ignored, "normalized": self._normalized, "raw": raw}
        return warnings_body(answers, self._unenforced, **more)


@dataclass(frozen=True, slots=True)
class Reporting:
    """What a client wants reported of its completions besides their texts."""

    logprobs: bool = False
    usage: bool = False
    """Whether a stream ends with the usage."""
    timings: bool = False
    """Whether the whole answer and a stream's last chunks have llama.cpp's `timings`."""
    has_body: bool = True
    """Whether a whole body is needed, which has all log probabilities."""


DEFAULT_REPORTING = Reporting()


class CompletionsOutput:
    """What OpenAI's chat completions and its older completions have in common."""

    PREFIX: ClassVar[str]
    """The beginning of the completions' ids."""
    BODY: ClassVar[str]
    CHUNK: ClassVar[str]
    """The names of the objects."""

    def __init__(self, accumulator: Accumulator, reporting: Reporting) -> None:
        self._accumulator = accumulator
        self._reporting = reporting
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._began = time.monotonic()
        self._created = int(time.time())

    def add(self, event: Event) -> None:
        self._accumulator.add(event)

    def end(self) -> Iterator[Wire]:
        if self._reporting.usage:
            usage = self._accumulator.usage()
            yield {**self._head(self.CHUNK), "choices": [], "usage": usage, **self._timings()}

    def _head(self, kind: str) -> Wire:
        fingerprint = self._accumulator.fingerprint
        tier = openai_tier(self._accumulator.service_tier)
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._accumulator.model,
            # OpenAI's schema does not allow null
            **({"system_fingerprint": fingerprint} if fingerprint else {}),
            **({"service_tier": tier} if tier else {}),
        }

    def _whole(self, choices: Sequence[Wire]) -> Wire:
        return {
            **self._head(self.BODY),
            "choices": choices,
            "usage": self._accumulator.usage(),
            **self._timings(),
            **self._accumulator.warnings(*self._accumulator.answers),
        }

    def _chunk(self, choices: Sequence[Wire]) -> Wire:
        unset = {"usage": None} if self._reporting.usage else {}
        return {**self._head(self.CHUNK), "choices": choices, **unset}

    def _last_chunk(self, choices: Sequence[Wire], answer: Answer) -> Wire:
        return {**self._chunk(choices), **self._timings(), **self._accumulator.warnings(answer)}

    def _timings(self) -> Wire:
        return self._accumulator.timings() if self._reporting.timings else {}

    def _progress(self, event: PromptProgress) -> Wire:
        return prompt_progress(event, time.monotonic() - self._began)


def warnings_body(
    answers: Sequence[Answer], unenforced: Sequence[str] = (), **more: Sequence[Any]
) -> dict[str, Any]:
    """The body's `mlx_server` field, for which OpenAI's schema has no place; empty without
    warnings. more: further lists, of which those that are empty are left out."""
    repairs = [
        {"index": repair.index, "what": repair.what, "where": repair.where}
        for each in answers
        for repair in each.repairs
    ]
    unmet = [
        {"index": violation.index, "what": violation.what}
        for each in answers
        for violation in each.violations
    ]
    optional = {name: list(listed) for name, listed in {"unmet": unmet, **more}.items() if listed}
    if not (repairs or unenforced or optional):
        return {}
    return {"mlx_server": {"repairs": repairs, "unenforced": list(unenforced), **optional}}
