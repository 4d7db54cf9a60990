"""Answers that are given, decoded in passes with drafts, and the seconds that passes would take.

Counts are those of the server's own drafters and gate. Seconds are those of the roofline, but for
the weights of matrices: a quantised kernel reads them more often, the more positions a pass has, as
measurements of MLX 0.32 show that others published (ml-explore/mlx issue 3852, 4 bits, M4 Pro).
Experts are read for each pair of a position and an expert, see mlx_server/worker/kernels.py.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from bench_parts.simulated.roofline import MACHINES, MODELS, Machine, Model
from bench_parts.speculation.corpora import Sample
from mlx_server.grammars.compiler import LIMITS
from mlx_server.grammars.grammar import text_of
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.costs import MOST_ROWS, CostCurve
from mlx_server.worker.kernels import SORTED, time_of
from mlx_server.worker.speculation.draft import Draft, Drafter
from mlx_server.worker.speculation.gate import LAUNCH, MOST_DRAFTED, Gate
from mlx_server.worker.speculation.row_drafter import MatcherAfter, row_drafter

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
    shares: bool = False
    """Whether an expert is read once for all positions that use it, from 64 pairs on, as if the
    chip's cache or another kernel gave them that."""

    @property
    def name(self) -> str:
        return f"{self.machine} {self.model}{', experts shared' * self.shares}"

    def cache_seconds(self, rows: int) -> float:
        """Returns what reading the keys and values takes, once for all positions of a row."""
        return rows * CONTEXT * MODELS[self.model].kv_bytes / MACHINES[self.machine].bandwidth

    def costs(self) -> CostCurve:
        """Returns what passes take without keys and values, padded where that takes less."""
        return _costs(self)


@cache
def _costs(mac: Mac) -> CostCurve:
    sizes = range(1, MOST_ROWS + 1)
    return CostCurve({size: _pass_seconds(mac, size) for size in sizes}, {1: 1.0})


def _pass_seconds(mac: Mac, positions: int) -> float:
    machine: Machine = MACHINES[mac.machine]
    model: Model = MODELS[mac.model]
    curve = CostCurve(CURVES[mac.curve], {1: 1.0})
    dense = model.dense_bytes / machine.bandwidth * float(curve.step(positions))
    experts = time_of(
        [product for product in model.products if product.experts],
        *(positions, machine.known_chip, machine.bandwidth, machine.operations),
    )
    if mac.shares and positions * model.used >= SORTED:
        reached = 1 - (1 - model.used / model.experts) ** positions
        experts = reached * model.expert_bytes / machine.bandwidth
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
    """The complete ones."""
    seconds: float = 0.0
    tokens: int = 0
    """Those of all rows: which answers are complete at the end depends on the passes."""

    @property
    def tokens_per_pass(self) -> float:
        passes = sum(answer.passes for answer in self.answers)
        return sum(answer.at - 1 for answer in self.answers) / passes


class Drafters:
    """Makes the drafters of samples as the server does for a row."""

    def __init__(self, vocabulary: Vocabulary, tokenize: Tokenize) -> None:
        self._vocabulary, self.tokenize = vocabulary, cache(tokenize)

    @property
    def trie(self) -> LLTokenizer:
        return self._vocabulary.trie

    def of(self, sample: Sample, gate: Gate, matcher: MatcherAfter | None = None) -> Drafter:
        """matcher: in place of the grammar's."""
        if sample.schema and not matcher:
            source = f"start: %json {text_of(sample.schema)}"
            matcher = partial(_after, LLMatcher(self.trie, source, limits=LIMITS))
        return self.of_row(self.tokenize(sample.prompt), gate, matcher)

    def of_row(
        self,
        prompt: Sequence[int],
        gate: Gate,
        matcher: MatcherAfter | None = None,
        prediction: Sequence[int] = (),
    ) -> Drafter:
        return row_drafter(prompt, prediction, matcher, self._vocabulary, gate)


def _after(matcher: LLMatcher, answer: Sequence[int]) -> LLMatcher | None:
    copy = matcher.deep_copy()
    return copy if copy.consume_tokens([*answer]) else None


def decode(
    samples: Iterable[Sample], drafters: Drafters, mac: Mac, rows: int, gate: Gate | None
) -> Outcome:
    """Decodes samples in a batch that always has so many rows, until as many answers are complete.
    gate: None to decode without drafts."""
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
        known = sum(answer.at for answer in batch)
        seconds = _step(batch, mac, gate)
        outcome.seconds += seconds
        outcome.tokens += sum(answer.at for answer in batch) - known
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
    seconds = mac.costs().step(rows + drafted_ones) + caches
    return seconds * (1 + LAUNCH * (drafted_ones > 0 or not launched))


def held(sample: Sample, drafters: Drafters, mac: Mac) -> list[int]:
    """Returns for each token of an answer how many after it would hold if all were drafted."""
    tokens, counts = drafters.tokenize(sample.answer), list[int]()
    drafter = drafters.of(sample, Gate(mac.costs()))
    for at in range(1, len(tokens)):
        drafter.extend(tokens[at - 1 : at])
        draft = drafter.draft(min(MOST_DRAFTED, len(tokens) - at - 1))
        drafted = draft.tokens if draft else []
        pairs = zip(drafted, tokens[at:], strict=False)
        counts.append(next((n for n, (a, b) in enumerate(pairs) if a != b), len(drafted)))
    return counts


def bound(answers: Sequence[Sequence[int]], mac: Mac, *, is_held: bool) -> float:
    """Returns how many times as many tokens a second any gate could give one row, even if it knew
    which drafted tokens hold. answers: what `held` returns of each. is_held: see `Answer`."""
    costs = mac.costs()
    one = mac.cache_seconds(1)
    plain = (costs.step(1) + one) * (1 + LAUNCH * is_held)
    least = 0.0
    for answer in answers:
        left = [0.0] * (len(answer) + 1)
        """The seconds from each token on."""
        for at in reversed(range(len(answer))):
            left[at] = plain + left[at + 1]
            for width in range(1, answer[at] + 1):
                seconds = (costs.step(1 + width) + one) * (1 + LAUNCH)
                left[at] = min(left[at], seconds + left[at + 1 + width])
        least += left[0]
    return plain * sum(map(len, answers)) / least


def speed_up(plain: Outcome, drafted: Outcome) -> tuple[float, float]:
    """Returns how many times as many tokens a second all answers have with drafts, and the one that
    gains least."""
    rates = [_rate(answer) for answer in drafted.answers]
    per_token = 1 / np.mean([_rate(answer) for answer in plain.answers])
    total = (drafted.tokens / drafted.seconds) * (plain.seconds / plain.tokens)
    return float(total), float(min(rates) * per_token)


def _rate(answer: Answer) -> float:
    return (answer.at - 1) / answer.seconds
