"""Random requests to an engine, answered with drafts and without.

Without drafts they are answered side by side, with nothing cached. With drafts they come one after
the other, are preempted, paused and cancelled between passes, and continue cached conversations.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from mlx_server.engine.messages import (
    CancelRows,
    Generate,
    LoadAdapter,
    LoadModel,
    PauseRows,
    Picture,
    PreemptRows,
    ResumeRows,
    Thinking,
    Token,
    UnpauseRows,
    media_ids,
)
from mlx_server.models.vision import Vision
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.engine import Engine
from mlx_server.worker.row import Row
from mlx_server.worker.speculation.draft import Draft, Drafter
from mlx_server.worker.speculation.gate import Gate
from mlx_server.worker.speculation.row_drafter import drafter_of
from tests.worker.constrained_decoding.grammars import ENDS, GRAMMARS
from tests.worker.engine_runs import drain, failures, grammar_of, tokens
from tests.worker.speculation.drafted_runs import SAMPLINGS, Always, Oracle, assert_equal

SHARE = {"grammar": 0.25, "thinking": 0.2, "adapter": 0.3, "picture": 0.5, "loops": 0.1}
"""How many of the requests have each of these."""


@dataclass
class Model:
    """What requests can ask for."""

    path: Path
    vocabulary: int
    tokenizer: Path
    kv_bits: int | None = None
    adapters: dict[str, Path] = field(default_factory=dict)
    vision: Vision | None = None

    def load(self, engine: Engine, *, drafts: bool) -> None:
        sees = self.vision is not None
        command = LoadModel("m", str(self.path), ENDS, str(self.tokenizer), self.kv_bits)
        command.sees, command.speculation = sees, drafts
        engine.handle(command)
        drain(engine)
        for name, folder in self.adapters.items():
            engine.handle(LoadAdapter("m", name, str(folder)))


@dataclass
class MixedRequest:
    request: Generate
    ends_after: int | None
    """The tokens after which its client leaves, as after a stop string."""
    right: float | None = None
    """How often a drafted token is right; None: what the real drafters find."""


Answer = list[Token]


def conversations(model: Model, dice: random.Random, count: int) -> list[MixedRequest]:
    return [_first_turn(model, dice, row) for row in range(count)]


def _first_turn(model: Model, dice: random.Random, row: int) -> MixedRequest:
    length = dice.randint(1, 150)
    prompt = [dice.randrange(model.vocabulary) for _ in range(length)]
    if dice.random() < 0.5:
        prompt = (prompt[:20] * 8)[:length]
    pictures = list[Picture]()
    if model.vision and dice.random() < SHARE["picture"]:
        prompt, pictures = _with_pictures(prompt, model.vision, dice)
    return _asked(model, dice, Generate(row, "m", prompt, 0, [], SAMPLINGS[0], pictures=pictures))


def next_turns(
    model: Model, dice: random.Random, first: Sequence[MixedRequest], answers: dict[int, Answer]
) -> list[MixedRequest]:
    """The same conversations, with what was answered until the client left."""
    turns = []
    for one in first:
        asked, answer = one.request, [token.id for token in answers[one.request.row]]
        more = [dice.randrange(model.vocabulary) for _ in range(dice.randint(1, 12))]
        prompt = [*asked.prompt, *answer[: one.ends_after], *more]
        row = asked.row + len(first)
        turn = Generate(row, "m", prompt, 0, [], SAMPLINGS[0], pictures=asked.pictures)
        turns.append(_asked(model, dice, turn))
        turns[-1].request.adapter = asked.adapter
    return turns


def _asked(model: Model, dice: random.Random, request: Generate) -> MixedRequest:
    def by(name: str) -> bool:
        return dice.random() < SHARE[name]

    request.max_tokens, request.sampling = dice.randint(1, 48), dice.choice(SAMPLINGS)
    request.stop_tokens = [dice.randrange(model.vocabulary) for _ in range(dice.choice([0, 0, 30]))]
    if by("grammar"):
        request.grammar, request.stop_tokens = grammar_of(dice.choice(GRAMMARS)), ENDS
    if by("thinking"):
        request.thinking = Thinking(
            dice.randint(0, 12), dice.random() < 0.7, [b"<think>"], [b"</think>"], [40, 41]
        )
    request.loops = 3 if by("loops") else None
    request.adapter = dice.choice([*model.adapters]) if model.adapters and by("adapter") else None
    leaves = dice.randint(1, 20) if dice.random() < 0.2 else None
    return MixedRequest(request, leaves, dice.choice([None, None, 0.3, 0.7, 0.95, 1.0]))


def _with_pictures(
    prompt: list[int], vision: Vision, dice: random.Random
) -> tuple[list[int], list[Picture]]:
    pictures, seen = list[Picture](), prompt[:20]
    for _ in range(dice.randint(1, 2)):
        ((size,),) = vision.fit().resizes(dice.randint(30, 130), dice.randint(30, 90))
        width, height = size
        noise = np.random.default_rng(dice.randrange(99)).integers(0, 255, (height, width, 3))
        pixels = noise.astype(np.uint8).tobytes()
        digest = sha256(pixels).digest()
        (count,) = vision.layout([size])
        assert isinstance(count, int)
        pictures.append(Picture(len(seen), digest, count, [size], pixels))
        seen += [*media_ids(digest, count), *prompt[20:40]]
    return seen, pictures


def answered_without(model: Model, asked: Sequence[MixedRequest]) -> dict[int, Answer]:
    engine = Engine(concurrency=8, clock=lambda: 0.0)  # no mask is slow
    model.load(engine, drafts=False)
    reports = [report for one in asked for report in engine.handle(one.request)]
    reports += drain(engine)
    assert not failures(reports)
    answers: dict[int, Answer] = {one.request.row: [] for one in asked}
    for token in tokens(reports):
        answers[token.row].append(token)
    return answers


class Both:
    """Drafts from several sources, in turns."""

    def __init__(self, drafters: Sequence[Drafter], dice: random.Random) -> None:
        self._drafters, self._dice = drafters, dice

    def extend(self, read: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.extend(read)

    def draft(self, most: int) -> Draft | None:
        return self._dice.choice(self._drafters).draft(most)


class MixedRun:
    """An engine that sends every draft."""

    def __init__(self, model: Model, dice: random.Random) -> None:
        self._model, self._dice = model, dice
        self._asked: dict[int, MixedRequest] = {}
        self.truth: dict[int, Answer] = {}
        self.answers: dict[int, Answer] = {}
        names: Any = {"Gate": lambda curve: Always(), "drafter_of": self._drafter}
        with patch.multiple("mlx_server.worker.engine", **names):
            self.engine = Engine(concurrency=8, cache_bytes=1 << 30, clock=lambda: 0.0)
            model.load(self.engine, drafts=True)

    def _drafter(
        self, row: Row, gate: Gate, vocabulary: Callable[[], Vocabulary | None]
    ) -> Drafter:
        real, right = drafter_of(row, gate, vocabulary), self._asked[row.number].right
        if right is None:
            return real
        truth = [token.id for token in self.truth[row.number]]
        oracle = Oracle(truth, right, self._model.vocabulary, row.number)
        return Both([oracle, real], self._dice)

    def run(self, asked: Sequence[MixedRequest], truth: dict[int, Answer]) -> None:
        self.truth |= truth
        self._asked |= {one.request.row: one for one in asked}
        dice, coming = self._dice, [*asked]
        dice.shuffle(coming)
        away, paused = list[int](), list[int]()
        while coming or away or paused or self.engine.pause is not None:
            if coming and dice.random() < 0.3:
                self._take(self.engine.handle(coming.pop().request))
            open_rows = [row for row in self.answers if row not in (*away, *paused, *self.ended)]
            if open_rows and dice.random() < 0.1:
                away.append(dice.choice(open_rows))
                self._take(self.engine.handle(PreemptRows(away[-1:])))
            elif open_rows and dice.random() < 0.1:
                paused.append(dice.choice(open_rows))
                self._take(self.engine.handle(PauseRows(paused[-1:])))
            if away and dice.random() < 0.3:
                self._take(self.engine.handle(ResumeRows([away.pop(0)])))
            if paused and dice.random() < 0.3:
                self._take(self.engine.handle(UnpauseRows([paused.pop(0)])))
            self._take(self.engine.step())

    @property
    def ended(self) -> set[int]:
        ends = {row for row, answer in self.answers.items() if answer[-1].finish}
        return ends | {row for row in self.answers if self._is_left(row)}

    def _is_left(self, row: int) -> bool:
        leaves = self._asked[row].ends_after
        return leaves is not None and len(self.answers[row]) >= leaves

    def _take(self, reports: Sequence[Any]) -> None:
        assert not failures([*reports])
        leaving = set[int]()
        for token in tokens([*reports]):
            self.answers.setdefault(token.row, []).append(token)
            if self._is_left(token.row):
                leaving.add(token.row)
        if leaving:
            self._take(self.engine.handle(CancelRows([*leaving])))


def assert_drafts_change_nothing(model: Model, seed: int, count: int) -> MixedRun:
    """Answers so many conversations of two turns each."""
    dice = random.Random(seed)
    run = MixedRun(model, random.Random(seed + 1))
    asked = conversations(model, dice, count)
    for turn in range(2):
        asked = next_turns(model, dice, asked, run.truth) if turn else asked
        run.run(asked, answered_without(model, asked))
        for one in asked:  # after a client has left, more tokens may have come in the same step
            row, end = one.request.row, one.ends_after
            assert_equal(run.truth[row][:end], run.answers[row][:end])
    return run
