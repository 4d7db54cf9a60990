"""Answers that are given, decoded in passes with drafts, and the seconds that the passes would take.

Counts are those of the server's own drafters and gate. Seconds are those of the roofline, but for
the weights of matrices, which a quantised kernel reads more often, the more positions a pass has:
published measurements of MLX 0.32 say how often (ml-explore/mlx issue 3852, 4 bits, M4 Pro). Experts
are read for each pair of a position and an expert, see mlx_server/worker/kernels.py.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
from llguidance import LLMatcher

from bench_parts.simulated.roofline import MACHINES, MODELS, Machine, Model
from bench_parts.speculation.corpora import Sample
from mlx_server.grammars.compiler import LIMITS
from mlx_server.grammars.grammar import text_of
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.costs import MOST_ROWS, CostCurve
from mlx_server.worker.kernels import time_of
from mlx_server.worker.speculation.approximate_tokenizer import ApproximateTokenizer
from mlx_server.worker.speculation.draft import Draft, Drafter
from mlx_server.worker.speculation.forced_text import ForcedText
from mlx_server.worker.speculation.gate import LAUNCH, Gate
from mlx_server.worker.speculation.lookup import TokenLookup
from mlx_server.worker.speculation.row_drafter import RowDrafter
from mlx_server.worker.speculation.text_lookup import TextLookup

CURVES = {
    "flat": {1: 1.0, 256: 1.0},
    "m4": {1: 1.0, 2: 1.0, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 32: 4.5, 64: 9.0},
    "m1": {1: 1.0, 2: 2.0},
}
"""How long reading the weights of matrices takes, by the positions of a pass."""

CONTEXT = 4000

Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Mac:
    machine: str
    model: str
    curve: str = "m4"

    @property
    def name(self) -> str:
        return f"{self.machine} {self.model}"

    def pass_seconds(self, positions: int) -> float:
        """Returns what a pass takes without keys and values."""
        return _pass_seconds(self, positions)

    def cache_seconds(self, rows: int) -> float:
        """Returns what reading the keys and values takes, once for all positions of a row."""
        return rows * CONTEXT * MODELS[self.model].kv_bytes / MACHINES[self.machine].bandwidth

    def costs(self) -> CostCurve:
        sizes = range(1, MOST_ROWS + 1)
        return CostCurve({size: self.pass_seconds(size) for size in sizes}, {1: 1.0})


@cache
def _pass_seconds(mac: Mac, positions: int) -> float:
    machine: Machine = MACHINES[mac.machine]
    model: Model = MODELS[mac.model]
    curve = CostCurve(CURVES[mac.curve], {1: 1.0})
    dense = model.dense_bytes / machine.bandwidth * float(curve.step(positions))
    experts = time_of(
        [product for product in model.products if product.experts],
        *(positions, machine.known_chip, machine.bandwidth, machine.operations),
    )
    computed = 0 if mac.curve == "flat" else 2 * model.active * positions / machine.operations
    return machine.launch + max(dense + experts, computed)


@dataclass
class Answer:
    """A row of the simulated batch."""

    tokens: Sequence[int]
    drafter: Drafter | None
    is_held: bool
    """Whether a grammar holds it, so that no pass is launched before its mask is known."""
    began: float
    at: int = 1
    seconds: float = 0.0
    passes: int = 0
    drafted: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.at


@dataclass
class Outcome:
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(answer.at - 1 for answer in self.answers)

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / sum(answer.passes for answer in self.answers)


class Drafters:
    """Makes the drafters of samples as the server does for a row."""

    def __init__(self, vocabulary: Vocabulary, tokenize: Tokenize) -> None:
        self._vocabulary, self.tokenize = vocabulary, cache(tokenize)
        classes = vocabulary.token_classes
        self._text_of, self._tokenizer = classes.text_of, ApproximateTokenizer(classes.ids)

    def of(self, sample: Sample, gate: Gate) -> Drafter:
        prompt = self.tokenize(sample.prompt)
        lookup = TokenLookup(prompt)
        text = TextLookup(prompt, self._text_of, self._tokenizer)
        drafters: list[Drafter] = [lookup, text]
        if sample.schema:
            matcher = self._matcher(text_of(sample.schema))
            drafters.append(ForcedText(partial(_after, matcher), self._tokenizer, lookup))
        return RowDrafter(drafters, gate)

    def _matcher(self, schema: str) -> LLMatcher:
        return LLMatcher(self._vocabulary.trie, f"start: %json {schema}", limits=LIMITS)


def _after(matcher: LLMatcher, answer: Sequence[int]) -> LLMatcher | None:
    copy = matcher.deep_copy()
    return copy if copy.consume_tokens([*answer]) else None


def decode(
    samples: Iterable[Sample], drafters: Drafters, mac: Mac, rows: int, gate: Gate | None
) -> Outcome:
    """Decodes samples in a batch that always has so many rows, of which only those of complete
    answers count. gate: None to decode without drafts."""
    waiting, outcome = deque(samples), Outcome()
    count, batch = len(waiting), list[Answer]()
    while len(outcome.answers) < count:
        while len(batch) < rows:
            sample = waiting.popleft()
            waiting.append(sample)
            tokens = drafters.tokenize(sample.answer)
            drafter = drafters.of(sample, gate) if gate else None
            if drafter:
                drafter.extend(tokens[:1])
            batch.append(Answer(tokens, drafter, bool(sample.schema), outcome.seconds))
        seconds = _step(batch, mac, gate)
        outcome.seconds += seconds
        for answer in [answer for answer in batch if not answer.left]:
            answer.seconds = outcome.seconds - answer.began
            outcome.answers.append(answer)
            batch.remove(answer)
    return outcome


def _step(batch: list[Answer], mac: Mac, gate: Gate | None) -> float:
    """Gives every row its next tokens. Returns the seconds that it takes."""
    rows, caches = len(batch), mac.cache_seconds(len(batch))
    launched = not any(answer.is_held for answer in batch)
    drafts: list[Draft | None] = [None] * rows
    widths = [0] * rows
    if gate and (most := gate.most(rows)):
        drafts = [
            answer.drafter.draft(min(most, answer.left - 1)) if answer.drafter else None
            for answer in batch
        ]
        widths = gate.widths(drafts, caches, launched=launched)
    for answer, draft, width in zip(batch, drafts, widths, strict=True):
        drafted = draft.tokens[:width] if draft else []
        right = 0
        while right < len(drafted) and drafted[right] == answer.tokens[answer.at + right]:
            right += 1
        came = answer.tokens[answer.at : answer.at + right + 1]
        if answer.drafter:
            answer.drafter.extend(came)
        answer.at += len(came)
        answer.passes += 1
        answer.drafted += width
    drafted_ones = sum(widths)
    seconds = mac.pass_seconds(rows + drafted_ones) + caches
    return seconds * (1 + LAUNCH * (drafted_ones > 0 or not launched))


def speed_up(plain: Outcome, drafted: Outcome) -> tuple[float, float]:
    """Returns how many times as many tokens a second all answers have with drafts, and the one that
    gains least."""
    rates = [_rate(answer) for answer in drafted.answers]
    per_token = 1 / np.mean([_rate(answer) for answer in plain.answers])
    total = (drafted.tokens / drafted.seconds) * (plain.seconds / plain.tokens)
    return float(total), float(min(rates) * per_token)


def _rate(answer: Answer) -> float:
    return (answer.at - 1) / answer.seconds
