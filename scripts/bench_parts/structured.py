"""`python -m bench_parts.structured FOLDER`: what a grammar costs a step of decoding.

The engine's batches in this process: tiny networks with the 49,152 tokens of the demo checkpoint
in FOLDER and with gpt-oss's 200,019 (a step of eight rows took 7 and 28 ms); and the demo model
(118 ms). Rows that fill in a JSON schema step in turns with rows that are free,
so that what else the machine does hits both; both choose the same way. Then 15 rows that end within
40 tokens, with and without everyday patterns, next to a plain row, on the tiny network: the shorter
the forward pass, the longer others would wait for the patterns. The rows without patterns are as
long as those with them, as a row that ends costs the others a step in new buffers. Prints one line
of JSON.
"""

import json
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx_lm.models.llama import Model, ModelArgs

from bench_parts.inside import timed
from mlx_server.engine.messages import Generate
from mlx_server.families import family_named
from mlx_server.grammars.lark import Lark
from mlx_server.requests import SamplingParams
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from mlx_server.worker.batch import Batch
from mlx_server.worker.constrained_decoding.logit_constraints import (
    LogitConstraint,
    LogitConstraints,
)
from mlx_server.worker.weights import loaded

ROWS = (1, 8)
PROMPT = 32
WARM, STEPS = 10, 150

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 40,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "role": {"enum": ["admin", "user", "guest"]},
                    "born": {"type": "string", "format": "date"},
                },
                "required": ["name", "age", "role", "born"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}

PATTERNS = (
    r"^[^@]+@[^@]+\.[^@]+$",
    "(foo|bar)",
    r"\d+\.\d+\.\d+",
    "^[A-Z]{2}-[0-9]{1,6}$",
    r"^https?://[^ ]+\.[a-z]{2,}$",
)
BUSY_ROWS, BUSY_TOKENS, ROUNDS = 15, 40, 5


@dataclass(frozen=True)
class GrammarCase:
    network: Any
    folder: Path
    """The folder of the tokenizer."""
    stop: int


def measured(folder: Path) -> dict[str, Any]:
    with TemporaryDirectory() as scratch:
        harmony = replay_checkpoint(Path(scratch), family_named("gpt_oss"))
        cases = {
            "49k": GrammarCase(_tiny(49_152), folder, 2),
            "200k": GrammarCase(_tiny(200_019), harmony, 200_002),
            "49k, demo model": GrammarCase(loaded(folder), folder, 2),
        }
        steps = {
            name: {str(rows): _steps(case, rows) for rows in ROWS} for name, case in cases.items()
        }
        return {"steps": steps, "stalls": _stalls(cases["49k"])}


def _steps(case: GrammarCase, rows: int) -> dict[str, float]:
    """Returns the medians of the milliseconds of an unconstrained step, and of what a grammar adds
    to it."""
    free, constrained = _decoding(case, rows, None), _decoding(case, rows, SCHEMA)
    rounds = [(timed(free.step), timed(constrained.step)) for _ in range(WARM + STEPS)][WARM:]
    assert free.decoding == constrained.decoding == rows, "a row has come to its end"
    return {
        "free": 1e3 * median(f for f, _ in rounds),
        "added": 1e3 * median(g - f for f, g in rounds),
    }


def _stalls(case: GrammarCase) -> dict[str, float]:
    """Returns the milliseconds of the longest step and of the 99th percentile, for which a plain
    row waits while 15 others end: without patterns and with them. Each round has the same steps;
    the longest of their least times is the longest without the pauses that the machine adds."""
    times: dict[str, list[list[float]]] = {"free": [], "patterns": []}
    limits = _busy_sizes(case)
    for _ in range(ROUNDS):
        batches = {"free": _busy(case, limits=limits), "patterns": _busy(case, PATTERNS)}
        for found in times.values():
            found.append([])
        for _ in range(BUSY_TOKENS - 2):
            for name, batch in batches.items():
                times[name][-1].append(timed(batch.step))
    stalls = dict[str, float]()
    for name, rounds in times.items():
        steps = [*chain(*rounds)]
        stalls[f"{name}, longest"] = 1e3 * max(steps)
        stalls[f"{name}, p99"] = 1e3 * quantiles(steps, n=100)[98]
        stalls[f"{name}, least"] = 1e3 * max(map(min, zip(*rounds, strict=True)))
    return stalls


def _busy_sizes(case: GrammarCase) -> dict[int, int]:
    """Returns the number of tokens of each row with a pattern, which stops by itself."""
    sizes = Counter[int]()
    batch = _busy(case, PATTERNS, sizes=sizes)
    while batch.decoding > 1:
        sizes.update(token.row for token in batch.step().tokens)
    return {row: sizes[row] for row in range(1, BUSY_ROWS + 1)}


def _busy(
    case: GrammarCase,
    patterns: Sequence[str] = (),
    limits: Mapping[int, int] = MappingProxyType({}),
    sizes: Counter[int] | None = None,
) -> Batch:
    """Returns a batch of a plain row and 15 that end within 40 tokens. limits: the token limits of
    some rows. sizes: counts the tokens that the rows have had while others began."""
    batch = Batch(case.network, concurrency=BUSY_ROWS + 1)
    woken = threading.Event()
    constraints = LogitConstraints(woken.set)
    constraints.expect("", case.folder, [case.stop])
    for row in range(BUSY_ROWS + 1):
        lark, pattern = Lark(), patterns[row % len(patterns)] if patterns and row else None
        text = {"type": "string", "pattern": pattern}
        schema = {"type": "object", "properties": {"a": text}, "required": ["a"]}
        grammar = lark.source(lark.json(schema)) if pattern else None
        sampling = SamplingParams(temperature=0.7, seed=row)
        most, stop = (limits.get(row, BUSY_TOKENS), [case.stop]) if row else (10_000, [])
        prompt = [(7 * row + 3 * place) % 100 + 5 for place in range(PROMPT)]
        asked = Generate(row, "", prompt, most, stop, sampling, grammar=grammar)
        batch.add(asked, constraint=_constraint(constraints, woken, asked))
    while batch.waiting:
        begun = batch.step()
        if sizes is not None:
            sizes.update(token.row for token in begun.tokens)
    return batch


def _constraint(
    constraints: LogitConstraints, woken: threading.Event, asked: Generate
) -> LogitConstraint | None:
    """Waits until the row's grammar is compiled."""
    while asked.grammar and (constraint := constraints.constraint(asked)) is None:
        woken.wait()
        woken.clear()
    return constraint if asked.grammar else None


def _decoding(case: GrammarCase, rows: int, schema: Any) -> Batch:
    batch = Batch(case.network, concurrency=max(ROWS))
    woken = threading.Event()
    constraints = LogitConstraints(woken.set)
    constraints.expect("", case.folder, [case.stop])
    lark = Lark()
    grammar = lark.source(lark.json(schema)) if schema else None
    for row in range(rows):
        prompt = [(7 * row + 3 * place) % 100 + 5 for place in range(PROMPT)]
        sampling = SamplingParams(temperature=0.7, seed=row)
        stop = [case.stop] if schema else []  # a free row may end at any step
        asked = Generate(row, "", prompt, 10_000, stop, sampling, grammar=grammar)
        batch.add(asked, constraint=_constraint(constraints, woken, asked))
    while batch.waiting:
        batch.step()
    return batch


def _tiny(vocabulary: int) -> Any:
    mx.random.seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
    model = Model(ModelArgs(model_type="llama", vocab_size=vocabulary, **shape, **heads))
    mx.eval(model.parameters())
    return model


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measured(Path(sys.argv[1]))) + "\n")
