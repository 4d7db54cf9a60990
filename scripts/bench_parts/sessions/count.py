"""Counts the prompt tokens that a server computes although it has computed them before."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx
import jinja2
import tokenizers

from bench_parts.contenders import answering, fast
from bench_parts.sessions import conversation, recorded
from bench_parts.sessions.conversation import TURNS, is_last_of_turn
from bench_parts.sessions.models import MODELS, TEMPLATE, save
from bench_parts.sessions.simulated_seconds import PAIR, prefill_seconds
from bench_parts.tables import Row
from mlx_server.clients.bench import Target

Json = dict[str, Any]

SCENARIOS: Mapping[str, Callable[[int], Iterator[Json]]] = {
    **conversation.SCENARIOS,
    **recorded.SESSIONS,
}

COLUMNS = (
    *("model", "sessions", "server", "prompt tokens"),
    *("computed again", "share", "computed a request"),
    f"prefill of {PAIR}, s",
)

Start = Callable[[Path, Path | None], AbstractContextManager[Target]]
"""Starts a server for the model in a folder, and perhaps for another one."""

Interruption = Literal["", "restart", "swap"]
"""What happens in the middle of the sessions: nothing, the server starts anew, or another model is
loaded for which the present one has to make room."""

ANSWER_TOKENS = 4

READING_SECONDS = 1.0
"""Seconds for which a person reads the last answer of a turn; a server may use that time."""

OTHER_SHARE, OTHER_TOKENS = 0.01, 8
"""The share, and at least the tokens, by which a server's prompt may be longer or shorter than
expected, since servers trim white space."""

SECONDS = 300.0

OWN = "m"
"""The first model's id in this project's server."""

OTHER, OWN_OTHER = "llama", "other"
"""The model that the first one has to make room for, and its id."""

OTHER_PADDING = 8
"""The other model's weights are so many times as large as the first one's: a budget for it has room
for the first one's prompts, but not for both models."""

PROMPT_SHARE = 0.9
"""What the budget leaves for prompts while the larger model is loaded, as a share of the smaller
model's weights."""


_environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # noqa: S701  no HTML
_environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
RENDERER = _environment.from_string(TEMPLATE)


@dataclass(frozen=True)
class Count:
    model: str
    scenario: str
    server: str
    prompt_tokens: int
    again: int
    """Tokens that were computed although an earlier prompt began with all tokens up to them."""
    computed: int
    """Tokens that were computed after their request had arrived."""
    spans: Sequence[tuple[int, int]]
    """For each request, the number of cached tokens of its prompt, and the number of all its
    tokens."""
    interruption: Interruption = ""

    @property
    def requests(self) -> int:
        return len(self.spans)


@dataclass
class Seen:
    """The prompts so far as tokens, rendered as the servers do it."""

    tokenizer: tokenizers.Tokenizer
    prompts: list[list[int]] = field(default_factory=list)

    def tokens(self, body: Json) -> list[int]:
        messages = [_with_objects(message) for message in body["messages"]]
        text = RENDERER.render(**{**body, "messages": messages}, add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def add(self, prompt: list[int]) -> int:
        """Adds a prompt. Returns how many of its first tokens an ideal cache would have; the last
        token has to be computed in any case."""
        known = max((common(prompt, earlier) for earlier in self.prompts), default=0)
        self.prompts.append(prompt)
        return min(known, len(prompt) - 1)


def _with_objects(message: Json) -> Json:
    """Returns the message with the arguments of its calls as objects, as templates get them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(arguments)}}
        for call in message.get("tool_calls", [])
        for arguments in [call["function"]["arguments"]]
    ]
    return {**message, "tool_calls": calls}


def common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def counted(
    model: str, scenario: str, server: str, turns: int = TURNS, interruption: Interruption = ""
) -> Count:
    bodies = list(SCENARIOS[scenario](turns))
    spans, again = asked(model, bodies, SERVERS[server], interruption)
    total = sum(tokens for _, tokens in spans)
    computed = sum(tokens - cached for cached, tokens in spans)
    return Count(model, scenario, server, total, again, computed, spans, interruption)


def asked(
    model: str, bodies: Sequence[Json], start: Start, interruption: Interruption = ""
) -> tuple[list[tuple[int, int]], int]:
    """Returns `spans` and `again` of the Count."""
    with TemporaryDirectory() as folder, ExitStack() as running:
        path = save(model, Path(folder))
        other = _other(Path(folder)) if interruption == "swap" else None
        seen = Seen(tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")))
        again = 0
        spans: list[tuple[int, int]] = []
        target = running.enter_context(start(path, other))
        with httpx.Client(trust_env=False, timeout=SECONDS) as http:
            for at, body in enumerate(bodies):
                if interruption and at == len(bodies) // 2:
                    if other:
                        _ask(http, _swapped(target, other), {**bodies[0], "max_tokens": 1})
                    else:
                        running.close()
                        target = running.enter_context(start(path, None))
                usage = _ask(http, target, body)
                prompt = seen.tokens(body)
                trimmed = len(prompt) - usage["prompt_tokens"]
                if abs(trimmed) > OTHER_TOKENS + OTHER_SHARE * len(prompt):
                    raise RuntimeError(f"another prompt is rendered: {usage}, {len(prompt)}")
                # a server can't find in its cache what it trims
                ideal = seen.add(prompt) - max(0, trimmed)
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                again += max(0, ideal - cached)
                spans.append((cached, usage["prompt_tokens"]))
                if is_last_of_turn(body):
                    time.sleep(READING_SECONDS)
    return spans, again


def _swapped(target: Target, other: Path) -> Target:
    """Returns the same server with its name for the other model."""
    return replace(target, model=OWN_OTHER if target.model == OWN else str(other))


def _ask(http: httpx.Client, target: Target, body: Json) -> Json:
    asked = {"model": target.model, "max_tokens": ANSWER_TOKENS, "temperature": 0, **body}
    answer = http.post(f"{target.url}/v1/chat/completions", json=asked)
    answer.raise_for_status()
    usage: Json = answer.json()["usage"]
    return usage


@contextmanager
def _ours(folder: Path, other: Path | None, ahead: str = "auto") -> Iterator[Target]:
    config = folder.parent / "models.yaml"
    config.write_text(json.dumps(configuration(folder, other, ahead)))  # YAML includes JSON
    command = ["mlx_server", "serve", "--config", str(config), "--log-level", "error"]
    with answering(command, OWN, folder, {}) as (_, target):
        yield target


def configuration(folder: Path, other: Path | None, ahead: str = "auto") -> Json:
    # The checkpoints' own families have tokenizers that these do not have.
    models: Json = {OWN: {"source": str(folder), "family": "qwen3", "compute_ahead": ahead}}
    server: Json = {}
    if other:
        models[OWN_OTHER] = {"source": str(other), "family": "qwen3"}
        server["memory_budget"] = _room_for_one(folder, other)
    data = {"data_dir": str(folder.parent / "data")}
    return {"server": server, "store": data, "models": models}


def _other(folder: Path) -> Path:
    return save(OTHER, folder / "other", OTHER_PADDING)


def _room_for_one(*folders: Path) -> int:
    """Returns a memory budget for either of the models and its prompts, but not for both models."""
    weights = [(folder / "model.safetensors").stat().st_size for folder in folders]
    return max(weights) + int(PROMPT_SHARE * min(weights))


@contextmanager
def _mlx_lm(folder: Path, other: Path | None) -> Iterator[Target]:
    command = ["mlx_lm.server", "--model", str(folder), "--log-level", "ERROR"]
    with answering(command, "default_model", folder, fast()) as (_, target):
        yield target


SERVERS: Mapping[str, Start] = {
    "mlx-server": _ours,
    "mlx-server (never ahead)": partial(_ours, ahead="never"),
    "mlx_lm.server": _mlx_lm,
}


def counts(only: Sequence[str], interruptions: Sequence[Interruption]) -> Iterator[Count]:
    for model in MODELS:
        for scenario in SCENARIOS:
            for server in [server for server in SERVERS if server in only]:
                for interruption in interruptions:
                    yield counted(model, scenario, server, interruption=interruption)


def rows(counts: Sequence[Count]) -> Iterator[Row]:
    for c in counts:
        share = f"{100 * c.again / c.prompt_tokens:.1f} %"
        each = f"{c.computed / c.requests:.0f}"
        sessions = f"{c.scenario}, {c.interruption}" if c.interruption else c.scenario
        counted = str(c.prompt_tokens), str(c.again), share, each
        yield c.model, sessions, c.server, *counted, f"{prefill_seconds(c.spans):.1f}"
