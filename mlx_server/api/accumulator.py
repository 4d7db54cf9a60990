"""Collects the events of a request: the answers, their usage, repairs and violations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_server.api.timing import Timing
from mlx_server.events import (
    Event,
    Finished,
    FinishReason,
    PromptProgress,
    PromptScored,
    ReasoningDelta,
    Repaired,
    Started,
    TextDelta,
    TokenLogprob,
    TokensSoFar,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
)
from mlx_server.messages import ToolCall


@dataclass
class AccumulatedAnswer:
    """One answer, from the events so far."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    """Finished calls; a call that was cut off is not among them."""
    repairs: list[Repaired] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    raw: tuple[str, ...] = ()
    """The model's raw output, delimiters included, if the client requested it."""
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    """Log probabilities of the prompt's tokens, if the client requested them."""
    token_ids: list[int] = field(default_factory=list)
    """The ids of the answer's tokens, if the client requested them."""
    reported_ids: int = 0
    """The number of `token_ids` that the stream's chunks have had."""
    tokens: int = 0
    cached: int = 0
    reasoning_tokens: int = 0
    _begun: dict[int, ToolCallStarted] = field(default_factory=dict)
    _arguments: dict[int, list[str]] = field(default_factory=dict)

    def new_token_ids(self) -> list[int]:
        """Those that no chunk had."""
        found, self.reported_ids = self.token_ids[self.reported_ids :], len(self.token_ids)
        return found

    def add(self, event: Event) -> None:
        match event:
            case TextDelta(_, _, logprobs):
                self.texts.append(event.separated)
                self.logprobs.extend(logprobs)
            case ReasoningDelta():
                self.reasoning.append(event.separated)
            case Repaired():
                self.repairs.append(event)
            case Violation():
                self.violations.append(event)
            case PromptScored(_, tokens):
                self.prompt_logprobs = tokens
            case TokensSoFar() | Finished():
                self.tokens = event.completion_tokens
                self.cached = event.cached_tokens
                self.reasoning_tokens = event.reasoning_tokens
                if isinstance(event, TokensSoFar) and event.token is not None:
                    self.token_ids.append(event.token)
                if isinstance(event, Finished):
                    self.finish_reason, self.raw = event.reason, event.raw
            case ToolCallStarted():
                self._begun[event.call], self._arguments[event.call] = event, []
            case ToolCallDelta():
                self._arguments[event.call].append(event.arguments)
            case ToolCallFinished(_, call):
                begun = self._begun[call]
                arguments, extra = "".join(self._arguments[call]), begun.extra_content
                self.calls.append(ToolCall(begun.id, begun.name, arguments, extra_content=extra))


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


class Accumulator:
    def __init__(self, *, model: str, prompts: int, n: int) -> None:
        self.model = model
        self.fingerprint: str | None = None
        self.answers: Sequence[AccumulatedAnswer] = [
            AccumulatedAnswer() for _ in range(prompts * n)
        ]
        self._n = n
        self.prompt_token_ids: Sequence[Sequence[int]] = ()
        self._timing = Timing()
        self.prompt_tokens = self.estimated_prompt_tokens = self._tool_output_tokens = 0
        self._unenforced: Sequence[str] = ()
        self._normalized: Sequence[str] = ()

    def add(self, event: Event) -> None:
        self._timing.note(event)
        match event:
            case Started():
                self.prompt_token_ids = event.prompt_token_ids
                self.model = event.model
                self.fingerprint = event.fingerprint
                self.prompt_tokens = event.prompt_tokens
                self.estimated_prompt_tokens = event.estimated_prompt_tokens
                self._tool_output_tokens = event.tool_output_tokens
                self._unenforced = event.unenforced
                self._normalized = event.normalized
                return
            case Finished():
                self.prompt_tokens += event.further_prompt_tokens
                self._tool_output_tokens += event.further_tool_output_tokens
        self.answers[event.index].add(event)

    def fingerprint_fields(self) -> dict[str, str]:
        """Empty without a fingerprint: OpenAI's schema does not allow null."""
        return {"system_fingerprint": self.fingerprint} if self.fingerprint else {}

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`. A prompt and its cached tokens count once, also with `n` answers."""
        completion = sum(answer.tokens for answer in self.answers)
        cached = sum(answer.cached for answer in self.answers[:: self._n])
        reasoning = sum(answer.reasoning_tokens for answer in self.answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {
                "cached_tokens": cached,
                **tool_output_tokens(self._tool_output_tokens),
            },
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def timings(self) -> dict[str, Any]:
        """llama.cpp's `timings` of all answers together."""
        tokens = sum(answer.tokens for answer in self.answers)
        cached = sum(answer.cached for answer in self.answers[:: self._n])
        return {"timings": self._timing.timings(self.prompt_tokens, cached, tokens)}

    def warnings(self, *answers: AccumulatedAnswer) -> dict[str, Any]:
        repairs = [repair for each in answers for repair in each.repairs]
        violations = [violation for each in answers for violation in each.violations]
        raw = [
            (i, text) for i, each in enumerate(self.answers) if each in answers for text in each.raw
        ]
        return warnings_body(
            repairs, self._unenforced, violations, normalized=self._normalized, raw=raw
        )


def prompt_logprobs_body(answer: AccumulatedAnswer) -> dict[str, Any]:
    """vLLM's `prompt_logprobs`, if the client requested them: for each token of the prompt its own
    and its alternatives' by their ids, and null for the first. The rank of a token that is not
    among the alternatives is null."""
    if answer.prompt_logprobs is None:
        return {}
    found = [
        _ranked(token) if token.logprob is not None else None for token in answer.prompt_logprobs
    ]
    return {"prompt_logprobs": found}


def _ranked(token: TokenLogprob) -> dict[str, Any]:
    ranks = {top.id: rank for rank, top in enumerate(token.top, 1)}
    return {
        str(each.id): {
            "logprob": each.logprob,
            "rank": ranks.get(each.id),
            "decoded_token": each.token,
        }
        for each in (token, *token.top)
    }


def tool_output_tokens(count: int) -> dict[str, int]:
    """The member of a usage's details, which OpenAI's does not have; empty without tool results."""
    return {"tool_output_tokens": count} if count else {}


def warnings_body(
    repairs: Sequence[Repaired],
    unenforced: Sequence[str],
    violations: Sequence[Violation],
    ignored: Sequence[str] = (),
    normalized: Sequence[str] = (),
    raw: Sequence[tuple[int, str]] = (),
) -> dict[str, Any]:
    """The body's `mlx_server` field, for which OpenAI's schema has no place; empty without
    warnings. raw: the index of an answer and what the model wrote, if requested."""
    if not (repairs or unenforced or violations or ignored or normalized or raw):
        return {}
    repaired = [{"index": each.index, "what": each.what, "where": each.where} for each in repairs]
    unmet = [{"index": each.index, "what": each.what} for each in violations]
    written = [{"index": index, "text": text} for index, text in raw]
    optional = {
        "unmet": unmet,
        "ignored": list(ignored),
        "normalized": list(normalized),
        "raw": written,
    }
    rest = {name: found for name, found in optional.items() if found}
    return {"mlx_server": {"repairs": repaired, "unenforced": list(unenforced), **rest}}
