"""Tokens a pass and what they are worth, next to what is to be reached."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from bench_parts.speculation import corpora
from bench_parts.speculation.corpora import Sample
from bench_parts.speculation.simulated import (
    CURVES,
    Drafters,
    Mac,
    bound,
    decode,
    held,
    speed_up,
)
from bench_parts.tables import Row
from mlx_server.sources.demo import demo_checkpoint
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.speculation.gate import Gate

MACS = (
    Mac("m4-pro", "8b"),
    *(Mac("m4-max", model) for model in ("30b-a3b", "gpt-oss-120b")),
    *(Mac("m4-max", model, shares=True) for model in ("30b-a3b", "gpt-oss-120b")),
)
GOALS = (0, 1, 2, 1, 2)
"""The place of each Mac's goal, which was set for experts that are shared."""

CASES: Mapping[str, tuple[Callable[[], list[Sample]], float, tuple[float, ...]]] = {
    "copy of 300 tokens with 8 edits": (corpora.copies, 6, (3.0, 2.2, 1.6)),
    "a whole file written again": (corpora.whole_files, 10, (4.5, 3.3, 2.2)),
    "edit call, text as it is": (corpora.edit_calls, 3.2, (2.0, 1.5, 1.3)),
    "edit call in JSON": (corpora.json_edit_calls, 2.7, ()),
    "unified diff": (corpora.diffs, 2.0, ()),
    "quote of a tool's result": (lambda: corpora.quotes() * 3, 1.6, ()),
    "JSON by a schema": (corpora.by_schema, 1.75, (1.6, 1.25, 1.25)),
    "tool call by a grammar": (lambda: corpora.tool_calls() * 2, 1.85, (1.6, 1.25, 1.25)),
}
"""What is decoded, the tokens a pass to be reached by the first Mac, and the times as many tokens a
second by each."""

PLAIN = {"prose": corpora.prose, "new code": corpora.new_code}
ROWS = (1, 4, 8, 16)
COPYING = {4: 1.8, 8: 2.0}
"""How much faster rows that all copy are to be on the first Mac, by their number."""
LEAST, EVEN = 0.98, 1 - 1e-9

MOST, TOKENS, PROMPT = 40, range(20, 2500), 6000
"""The most answers of a case, the tokens that one has, and the most tokens of its prompt."""

COLUMNS = (
    "case",
    "machine",
    "curve",
    "rows",
    "tokens/pass",
    "wanted",
    "x tokens/s",
    "wanted",
    "at most",
    "least",
)


@dataclass(frozen=True)
class Measured:
    case: str
    mac: str
    curve: str
    rows: int
    tokens_per_pass: float
    speed: float
    least: float
    """The times as many tokens a second of all answers, and of the one that gains least."""
    bound: float = 0.0
    """The speed that no gate can exceed with these drafts; 0 where it is not computed."""
    wanted_tokens: float = 0.0
    wanted_speed: float = 0.0
    wanted_least: float = 0.0

    @property
    def reached(self) -> bool:
        pairs = (
            (self.tokens_per_pass, self.wanted_tokens),
            (self.speed, self.wanted_speed),
            (self.least, self.wanted_least),
        )
        return all(found >= wanted for found, wanted in pairs)


def measurements() -> Iterator[Measured]:
    folder = demo_checkpoint(lambda *progress: None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    drafters = Drafters(
        Vocabulary(Path(folder), [2]).build(),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
    )
    for case, (samples, tokens, speeds) in CASES.items():
        taken = _taken(drafters, samples())
        right = [held(sample, drafters, MACS[0]) for sample in taken]
        for at, mac in enumerate(MACS):
            wanted = (0.0 if at else tokens), (speeds[GOALS[at]] if speeds else 0.0)
            found = _measured(drafters, case, taken, mac, 1, *wanted)
            yield replace(found, bound=bound(right, mac, is_held=bool(taken[0].schema)))
    for rows, speed in COPYING.items():
        yield _measured(drafters, "all rows copy", corpora.copies(), MACS[0], rows, 0.0, speed)
    for case, plain in PLAIN.items():
        for curve in CURVES:
            for rows in ROWS:
                mac = Mac("m4-pro", "8b", curve)
                yield _measured(drafters, case, plain(), mac, rows, 0.0, EVEN, LEAST)


def _taken(drafters: Drafters, samples: list[Sample]) -> list[Sample]:
    return [
        sample
        for sample in samples
        if len(drafters.tokenize(sample.answer)) in TOKENS
        and len(drafters.tokenize(sample.prompt)) < PROMPT
    ][:MOST]


def _measured(
    drafters: Drafters,
    case: str,
    samples: list[Sample],
    mac: Mac,
    rows: int,
    *wanted: float,
) -> Measured:
    taken = _taken(drafters, samples)
    off = decode(taken, drafters, mac, rows, None)
    on = decode(taken, drafters, mac, rows, Gate(mac.costs()))
    speed, least = speed_up(off, on)
    found = case, mac.name, mac.curve, rows, on.tokens_per_pass, speed, least
    return Measured(*found, 0.0, *wanted)


def rows(found: list[Measured]) -> Iterator[Row]:
    for each in found:
        yield (
            *(each.case, each.mac, each.curve, str(each.rows)),
            *(f"{each.tokens_per_pass:.2f}", _bound(each.wanted_tokens)),
            *(f"{each.speed:.2f}", _bound(each.wanted_speed)),
            f"{each.bound:.2f}" if each.bound else "",
            f"{each.least:.2f}" + ("" if each.reached else " (not reached)"),
        )


def _bound(wanted: float) -> str:
    return f">= {wanted:.3g}" if wanted else ""
