"""How long the phases of an answer took, as Ollama and llama.cpp report it."""

import time
from typing import Any

from mlx_server.events import Event, PromptProgress, PromptScored, Started


class Timing:
    """The nanoseconds of each phase; the clock starts when the request has been read."""

    def __init__(self) -> None:
        self._began = self._loaded = self._answered = time.perf_counter_ns()
        self._has_answered = False

    def note(self, event: Event) -> None:
        if self._has_answered or isinstance(event, PromptProgress | PromptScored):
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
