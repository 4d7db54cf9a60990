"""Random requests to an engine, answered with drafts and without.

Without drafts they are answered side by side, with nothing cached. With drafts they come one after
the other, are preempted, paused and cancelled between passes, and continue cached conversations.
Passes send any part of any draft.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from mlx_server.engine.messages import (
    CancelRows,
    Command,
    Generate,
    LoadAdapter,
    LoadModel,
    PauseRows,
    Picture,
    PreemptRows,
    Report,
    ResumeRows,
    Thinking,
    Token,
    UnpauseRows,
    media_ids,
)
from mlx_server.models.vision import Vision, vision_of
from mlx_server.worker.engine import Engine
from tests.tiny import TOKENS
from tests.tiny_vision import tiny_vision
from tests.worker.constrained_decoding.grammars import ENDS, GRAMMARS
from tests.worker.engine_runs import drain, failures, grammar_of, tokens
from tests.worker.speculation.drafted_runs import SAMPLINGS, Wild, distance, drafted, is_same

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

    def load(self, *, drafts: bool) -> list[list[Command]]:
        """Returns the commands to give, some when those before are done."""
        model = LoadModel("m", str(self.path), ENDS, str(self.tokenizer), self.kv_bits)
        model.sees, model.speculation = self.vision is not None, drafts
        adapters = (LoadAdapter("m", name, str(path)) for name, path in self.adapters.items())
        return [[model], [*adapters]]


def seeing_model(family: str, folder: Path, tokenizer: Path) -> Model:
    path = tiny_vision(folder / "m", family)
    config = json.loads((path / "config.json").read_text("utf-8"))
    return Model(path, TOKENS, tokenizer, vision=vision_of(path, config))


@dataclass
class MixedRequest:
    request: Generate
    ends_after: int | None
    """The tokens after which its client leaves, as after a stop string."""
    right: float | None = None
    """How often a token of its prediction is right; None: it has none."""


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
        if dice.random() < 0.5:
            request.thinking.rest = grammar_of(dice.choice(GRAMMARS))
            request.stop_tokens = ENDS
    request.loops = 3 if by("loops") else None
    request.adapter = dice.choice([*model.adapters]) if model.adapters and by("adapter") else None
    leaves = dice.randint(1, 20) if dice.random() < 0.2 else None
    return MixedRequest(request, leaves, dice.choice([None, None, 0.3, 0.7, 0.95, 1.0]))


def _with_pictures(
    prompt: list[int], vision: Vision, dice: random.Random
) -> tuple[list[int], list[Picture]]:
    pictures, seen = list[Picture](), prompt[:20]
    for _ in range(dice.randint(1, 2)):
        ((size,),) = vision.shown().resizes(dice.randint(30, 130), dice.randint(30, 90))
        width, height = size
        noise = np.random.default_rng(dice.randrange(99)).integers(0, 255, (height, width, 3))
        pixels = noise.astype(np.uint8).tobytes()
        digest = sha256(pixels).digest()
        (count,) = vision.layout([size])
        assert isinstance(count, int)
        pictures.append(Picture(len(seen), digest, count, [size], pixels))
        seen += [*media_ids(digest, count), *prompt[20:40], 5]
    return seen, pictures


def answered_without(model: Model, asked: Sequence[MixedRequest]) -> dict[int, Answer]:
    engine = Engine(concurrency=8, clock=lambda: 0.0)  # no mask is slow
    reports = list[Report]()
    requests: list[Command] = [one.request for one in asked]
    for commands in (*model.load(drafts=False), requests):
        reports += [report for command in commands for report in engine.handle(command)]
        reports += drain(engine)
    assert not failures(reports)
    answers: dict[int, Answer] = {one.request.row: [] for one in asked}
    for token in tokens(reports):
        answers[token.row].append(token)
    return answers


class MixedRun:
    """Commands of clients that come and go, in any order, and what they get."""

    def __init__(self, model: Model, seed: int, count: int) -> None:
        """Asks for so many conversations of two turns each."""
        self._dice = dice = random.Random(seed)
        first = conversations(model, dice, count)
        self.truth = answered_without(model, first)
        second = next_turns(model, dice, first, self.truth)
        self.truth |= answered_without(model, second)
        self.asked = {one.request.row: one for one in (*first, *second)}
        for one in self.asked.values():
            one.request.prediction = self._predicted(model, one)
        self._load = model.load(drafts=True)
        self._turns, self._coming = [first, second], list[MixedRequest]()
        self._away, self._paused, self._left = list[int](), list[int](), set[int]()
        self.answers: dict[int, Answer] = {}

    def _predicted(self, model: Model, one: MixedRequest) -> list[int]:
        """Returns the answer with errors."""
        if one.right is None:
            return []
        return [
            token.id if self._dice.random() < one.right else self._dice.randrange(model.vocabulary)
            for token in self.truth[one.request.row]
        ]

    def commands(self, *, idle: bool) -> list[Command] | None:
        """Returns those before the next step; None at the end. idle: whether the engine has nothing
        to do."""
        dice = self._dice
        if idle and not (self._coming or self._away or self._paused):
            if self._load:
                return self._load.pop(0)
            if not self._turns:
                return None
            self._coming = self._turns.pop(0)
            dice.shuffle(self._coming)
        commands = list[Command]()
        if self._left:
            commands.append(CancelRows([*self._left]))
            self._left.clear()
        if self._coming and dice.random() < 0.3:
            commands.append(self._coming.pop().request)
        gone = {*self._away, *self._paused, *self.ended}
        open_rows = [row for row in self.answers if row not in gone]
        if open_rows and dice.random() < 0.1:
            self._away.append(dice.choice(open_rows))
            commands.append(PreemptRows(self._away[-1:]))
        elif open_rows and dice.random() < 0.1:
            self._paused.append(dice.choice(open_rows))
            commands.append(PauseRows(self._paused[-1:]))
        if self._away and dice.random() < 0.3:
            commands.append(ResumeRows([self._away.pop(0)]))
        if self._paused and dice.random() < 0.3:
            commands.append(UnpauseRows([self._paused.pop(0)]))
        return commands

    @property
    def ended(self) -> set[int]:
        ends = {row for row, answer in self.answers.items() if answer[-1].finish}
        return ends | {row for row in self.answers if self._is_left(row)}

    def _is_left(self, row: int) -> bool:
        leaves = self.asked[row].ends_after
        return leaves is not None and len(self.answers[row]) >= leaves

    def take(self, *reports: Report) -> None:
        assert not failures([*reports])
        for token in tokens([*reports]):
            self.answers.setdefault(token.row, []).append(token)
            if self._is_left(token.row):
                self._left.add(token.row)

    @property
    def pairs(self) -> Iterator[tuple[Answer, Answer]]:
        """The answers without and with drafts, until their clients left: more tokens may have come
        in the same step."""
        for row, one in self.asked.items():
            yield self.truth[row][: one.ends_after], self.answers[row][: one.ends_after]

    @property
    def outcome(self) -> "Outcome":
        pairs = [*self.pairs]
        sent, held = drafted(chain.from_iterable(self.answers.values()))
        differing = sum(not is_same(off, on) for off, on in pairs)
        distances = (distance(a, b) for off, on in pairs for a, b in zip(off, on, strict=False))
        return Outcome(len(pairs), differing, max(distances, default=0.0), sent, held)


class Outcome(NamedTuple):
    requests: int
    differing: int
    """Answers with other tokens, another end, or other likeliest tokens."""
    distance: float
    """The largest one of two log probabilities."""
    sent: int
    held: int
    """How many drafted tokens were computed, and how many of them held."""


def any_draft_is_sent() -> AbstractContextManager[Any]:
    """For engines whose models are loaded meanwhile."""
    return patch("mlx_server.worker.engine.Gate", lambda curve: Wild())


def drafted_run(model: Model, seed: int, count: int) -> MixedRun:
    run = MixedRun(model, seed, count)
    with any_draft_is_sent():
        engine = Engine(concurrency=8, cache_bytes=1 << 30, clock=lambda: 0.0)
        while (commands := run.commands(idle=engine.pause is None)) is not None:
            for command in commands:
                run.take(*engine.handle(command))
            run.take(*engine.step())
    return run
