"""Rows that draft, and the same rows without drafts."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_server.engine.messages import Generate, Token
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch
from mlx_server.worker.constrained_decoding.logit_constraints import LogitConstraint
from mlx_server.worker.costs import FLAT
from mlx_server.worker.prompt_store import PromptStore
from mlx_server.worker.row import Row
from mlx_server.worker.speculation.draft import Draft
from mlx_server.worker.speculation.gate import MOST_DRAFTED, Gate

SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.7, seed=1, top_p=0.9),
    SamplingParams(temperature=1.0, seed=2, top_k=20, logprobs=2),
    SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, presence_penalty=0.5),
    SamplingParams(temperature=0.0, frequency_penalty=0.4, logit_bias={5: 2.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, logprobs=0),
    SamplingParams(temperature=0.7, seed=4, min_p=0.05, logit_bias={7: 3.0, 8: -100.0}),
]


class Always(Gate):
    """Sends every draft whole."""

    is_known = True

    def __init__(self) -> None:
        super().__init__(FLAT)

    def most(self, rows: int) -> int:
        return MOST_DRAFTED

    def widths(
        self, drafts: Sequence[Draft | None], extra: float = 0.0, *, launched: bool = True
    ) -> list[int]:
        return [len(draft.tokens) if draft else 0 for draft in drafts]


class Wild(Always):
    """Sends any part of any draft. Gates that are asked alike answer alike."""

    def __init__(self) -> None:
        super().__init__()
        self._dice = random.Random(5)

    def widths(
        self, drafts: Sequence[Draft | None], extra: float = 0.0, *, launched: bool = True
    ) -> list[int]:
        whole = super().widths(drafts)
        return [self._dice.choice([0, width, self._dice.randint(0, width)]) for width in whole]


class Oracle:
    """Knows the answer, and drafts each of its tokens with some probability, else another one."""

    def __init__(
        self, answer: Sequence[int], right: float | None, vocabulary: int, seed: int
    ) -> None:
        self._answer, self._right, self._vocabulary = list(answer), right, vocabulary
        self._known = 0
        self._dice = random.Random(seed)

    def extend(self, tokens: Sequence[int]) -> None:
        self._known += len(tokens)

    def draft(self, most: int) -> Draft | None:
        if self._right is None or self._dice.random() < 0.25:
            return None
        begin = self._known
        count = self._dice.randint(1, min(most, self._dice.choice([3, 8, 31])))
        tokens = [self._drafted(token) for token in self._answer[begin : begin + count]]
        return Draft(tokens, "oracle", 2) if tokens else None

    def _drafted(self, token: int) -> int:
        is_right = self._dice.random() < (self._right or 0.0)
        return token if is_right else self._dice.randrange(self._vocabulary)


@dataclass
class Asked:
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    right: float | None = 0.9
    """The probability that a drafted token is right; None: it drafts nothing."""
    fields: dict[str, Any] = field(default_factory=dict)
    constraint: Callable[[Generate], LogitConstraint] | None = None

    def request(self, number: int) -> Generate:
        stops = self.fields.get("stop_tokens", [])
        fields = {name: value for name, value in self.fields.items() if name != "stop_tokens"}
        made = Generate(number, "m", self.prompt, self.max_tokens, stops, self.sampling)
        for name, value in fields.items():
            setattr(made, name, value)
        return made


class DraftedRun:
    def __init__(
        self, model: Any, asked: Sequence[Asked], answers: Sequence[Sequence[int]] | None
    ) -> None:
        """answers: those without drafts, of which the drafts are made; None: nobody drafts."""
        self.asked, self.truth = asked, answers or ()
        self.cached: dict[int, int] = {}
        self.tokens: dict[int, list[Token]] = {}
        self.steps = 0

        def drafter(row: Row, gate: Gate) -> Oracle:
            right = self.asked[row.number].right
            return Oracle(self.truth[row.number], right, self.batch.vocabulary, row.number)

        self.prompts = PromptStore(1 << 30)
        gate = None if answers is None else Always()
        self.batch = Batch(model, concurrency=16, prompts=self.prompts, gate=gate, drafter=drafter)

    def join(self, number: int) -> None:
        one = self.asked[number]
        request = one.request(number)
        self.tokens[number] = []
        self.batch.add(request, constraint=one.constraint and one.constraint(request))

    def step(self) -> None:
        done = self.batch.step()
        assert not done.failed
        self.steps += bool(done.tokens)
        self.cached.update((each.row, each.cached_tokens) for each in done.prefilled)
        for token in done.tokens:
            self.tokens[token.row].append(token)

    def finish(self) -> "DraftedRun":
        for number in range(len(self.asked)):
            if number not in self.tokens:
                self.join(number)
        while self.batch:
            self.step()
        return self

    @property
    def answers(self) -> list[list[int]]:
        return [[token.id for token in self.tokens[number]] for number in sorted(self.tokens)]


def drafted(tokens: Iterable[Token]) -> tuple[int, int]:
    """Returns how many drafted tokens were computed, and how many of them held."""
    drafts = [token.drafts for token in tokens if token.drafts]
    return sum(sent for sent, _ in drafts), sum(held for _, held in drafts)


CLOSE = 2e-5
"""By how much log probabilities may differ: sums in float32 of other shapes are rounded otherwise,
and company without drafts changes them by 1.0e-5 too."""


def is_same(off: Sequence[Token], on: Sequence[Token]) -> bool:
    """Whether two answers differ in nothing but how log probabilities are rounded."""
    return [*map(_exact, on)] == [*map(_exact, off)]


def _exact(token: Token) -> tuple[object, ...]:
    likeliest = token.logprobs and [id for id, _ in token.logprobs.top]
    return token.id, token.finish, token.looped, likeliest


def distance(one: Token, other: Token) -> float:
    """Returns the largest difference of log probabilities of the same tokens."""
    if one.logprobs is None or other.logprobs is None:
        return 0.0
    pairs = [(one.logprobs.chosen, other.logprobs.chosen)]
    pairs += zip(dict(one.logprobs.top).values(), dict(other.logprobs.top).values(), strict=False)
    return max(abs(a - b) for a, b in pairs if a is not None and b is not None)


def assert_equal(off: Sequence[Token], on: Sequence[Token]) -> None:
    assert [*map(_exact, on)] == [*map(_exact, off)]
    assert max(map(distance, off, on), default=0.0) <= CLOSE


def assert_all_equal(off: DraftedRun, on: DraftedRun) -> None:
    for number, tokens in off.tokens.items():
        assert_equal(tokens, on.tokens[number])
