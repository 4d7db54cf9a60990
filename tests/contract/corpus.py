"""A folder of schemas with instances, as the server's grammars and plain llguidance read them.

A file holds `{"schema": ..., "tests": [{"valid": true, "data": ...}]}`, as those of MaskBench do
(part of JSONSchemaBench), or a schema alone. Times are the processor's, so that a busy machine
changes them little.
"""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from llguidance import LLMatcher

from mlx_server.engine.messages import Grammar
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.check import measure, written
from mlx_server.grammars.child import reply_to
from mlx_server.grammars.compiled import Compile, Compiled
from mlx_server.grammars.grammar import UnsupportedKeyword
from mlx_server.grammars.lark import OPTIONS
from mlx_server.worker.constrained_decoding import grammar_compiler
from mlx_server.worker.constrained_decoding.grammar_compiler import (
    CompiledGrammar,
    GrammarFailed,
    GrammarRefused,
)
from mlx_server.worker.constrained_decoding.grammar_completion import GrammarCompletion
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from tests.worker.constrained_decoding.worlds import World, say

SECONDS = 60.0
AMPLE = 100_000
TIGHT = 8
"""Tokens that an instance has left over in the second walk, where each step is near the limit."""

Reader = Callable[[Any], "Step"]
Step = Callable[[int | None, int], np.ndarray[Any, np.dtype[np.uint32]]]
"""Advances by a token, if there is one, and returns the mask. The other argument: tokens left."""


class Refused(Exception):
    pass


@dataclass
class Side:
    """What one way of reading schemas made of a corpus."""

    name: str
    completes: bool
    """Whether its rows are led to an ending before their token limit."""
    refused: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """How many instances, by whether they are valid and whether they were taken."""
    compile: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    step_near_limit: list[float] = field(default_factory=list)
    led_elsewhere: int = 0
    """Valid instances that the row could not follow with few tokens left over."""
    odd: list[str] = field(default_factory=list)
    """Valid instances that were refused, and invalid ones that were taken."""


def source_of(schema: Any) -> Grammar:
    try:
        text = written(schema)
        measure(schema)
        reply = reply_to(Compile(text, SECONDS))
        if not isinstance(reply, Compiled):
            raise Refused(getattr(reply, "message", "?"))
        for keyword in reply.unsupported:
            raise UnsupportedKeyword(*keyword).refusal()
        return Grammar(f"{OPTIONS}\nstart: j0\n", (("j0", reply.grammar),))
    except InvalidGrammar as error:
        raise Refused(error.message) from None


def grammar_of(schema: Any, vocabulary: Vocabulary) -> CompiledGrammar:
    try:
        return grammar_compiler.compiled(source_of(schema), vocabulary)
    except GrammarRefused as error:
        raise Refused(str(error)) from None


def ours(vocabulary: Vocabulary) -> Reader:
    def read(schema: Any) -> Step:
        grammar = grammar_of(schema, vocabulary)
        matcher = YieldingMatcher(grammar.matcher.deep_copy())
        completion = GrammarCompletion(vocabulary.token_classes, grammar.completion)

        def step(token: int | None, left: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
            if token is not None:
                matcher.consume_token(token)
                completion.advance(token)
            mask = np.zeros_like(vocabulary.ends)
            grammar_compiler.fill_bitmask(mask, matcher.own, vocabulary)
            if not matcher.own.is_stopped():
                completion.allow(mask.view(np.int32), left, matcher)
            return mask

        return step

    return read


def plain(vocabulary: Vocabulary) -> Reader:
    """llguidance by itself, with its own options and limits."""

    def read(schema: Any) -> Step:
        source = f"{OPTIONS}\nstart: %json {json.dumps(schema)}\n"
        matcher = LLMatcher(vocabulary.trie, source, log_level=0)
        mask = np.zeros_like(vocabulary.ends)
        try:
            grammar_compiler.fill_bitmask(mask, matcher.deep_copy(), vocabulary)
        except GrammarFailed as error:
            raise Refused(str(error)) from None

        def step(token: int | None, left: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
            if token is not None:
                matcher.consume_token(token)
            mask = np.zeros_like(vocabulary.ends)
            grammar_compiler.fill_bitmask(mask, matcher, vocabulary)
            return mask

        return step

    return read


def files_of(folder: Path, sample: int) -> list[Path]:
    files = sorted(folder.rglob("*.json"))
    return sorted(random.Random(0).sample(files, sample)) if 0 < sample < len(files) else files


def played(side: Side, read: Reader, file: Path, vocabulary: Vocabulary) -> None:
    schema, tests = _schema_and_tests(json.loads(file.read_text()))
    began = time.process_time()
    try:
        read(schema)
    except Refused as why:
        side.refused[reason(str(why))] += 1
        return
    side.compile.append(time.process_time() - began)
    for test in tests:
        text = json.dumps(test["data"], ensure_ascii=False).encode("utf-8", "surrogatepass")
        tokens = vocabulary.token_classes.cut(text)
        if not tokens:  # the vocabulary can't spell it
            continue
        taken = _takes(read(schema), tokens, vocabulary, AMPLE, side.step)
        side.verdicts[test["valid"], taken] += 1
        if taken and side.completes:
            times = side.step_near_limit
            side.led_elsewhere += not _takes(read(schema), tokens, vocabulary, TIGHT, times)
        if taken != test["valid"]:
            side.odd.append(f"{file.name}: {'valid' if test['valid'] else 'invalid'}")


def _schema_and_tests(document: Any) -> tuple[Any, list[Any]]:
    has_tests = isinstance(document, dict) and isinstance(document.get("tests"), list)
    return (document["schema"], document["tests"]) if has_tests else (document, [])


def _takes(
    step: Step, tokens: Sequence[int], vocabulary: Vocabulary, room: int, times: list[float]
) -> bool:
    last: int | None = None
    for at, token in enumerate([*tokens, vocabulary.token_classes.stop]):
        began = time.thread_time()  # the search's matcher is built in another thread
        try:
            mask = step(last, len(tokens) + 1 - at + room)
        except GrammarFailed:
            return False
        times.append(time.thread_time() - began)
        if not mask[token // 32] >> np.uint32(token % 32) & 1:
            return False
        last = token
    return True


def reason(message: str) -> str:
    """The message without what differs from schema to schema."""
    place = re.search(r"#/[^\s,:]*?([A-Za-z]+)(?=[\s,:).]|$)", message)
    text = re.sub(r"#/\S*|\"[^\"]*\"|'[^']*'|/[^/]*/|\d+", "…", message)
    return f"{place[1]}: {text[:90]}" if place else text[:100]


def lines(sides: Sequence[Side], files: int) -> Iterator[str]:
    yield f"{files} schemas"
    for side in sides:
        taken, valid = side.verdicts[True, True], sum(_of(side.verdicts, True))
        wrong, invalid = side.verdicts[False, True], sum(_of(side.verdicts, False))
        yield (
            f"{side.name}: {len(side.compile)} compiled, {side.refused.total()} refused; "
            f"{taken} of {valid} valid taken, {wrong} of {invalid} invalid taken"
        )
        yield f"  compile ms: {_spread(side.compile, 1e3)}"
        yield f"  step us: {_spread(side.step, 1e6)}"
        if side.completes:
            yield f"  step us, {TIGHT} tokens to spare: {_spread(side.step_near_limit, 1e6)}"
            yield f"  {side.led_elsewhere} valid instances can't be followed then"
        yield from (f"  refused {count:4}: {why}" for why, count in side.refused.most_common(25))
        yield from (f"  {odd}" for odd in side.odd[:25])


def _of(verdicts: Mapping[tuple[bool, bool], int], valid: bool) -> Iterator[int]:
    return (count for (is_valid, _), count in verdicts.items() if is_valid == valid)


def _spread(times: Sequence[float], unit: float) -> str:
    if len(times) < 2:
        return "-"
    cuts = quantiles(times, n=1000)
    found = {"median": median(times), "p99": cuts[989], "p99.9": cuts[998], "worst": max(times)}
    return ", ".join(f"{name} {seconds * unit:.1f}" for name, seconds in found.items())


def print_corpus(folder: Path, model: Path, sample: int) -> None:
    vocabulary = Vocabulary(model, [2]).build()
    files = files_of(folder, sample)
    sides = [Side("mlx-server", True), Side("llguidance", False)]
    readers = [ours(vocabulary), plain(vocabulary)]
    for side, read in zip(sides, readers, strict=True):
        for file in files:
            played(side, read, file, vocabulary)
    print("\n".join(lines(sides, len(files))))
    print("\n".join(walked(files, vocabulary)))


def walked(files: Sequence[Path], vocabulary: Vocabulary) -> Iterator[str]:
    """A walk may have the tokens of the shortest known answer and a quarter more, or 8 tokens."""
    world = World(list(vocabulary.text), {}, vocabulary.trie, vocabulary.token_classes.stop)
    count, cut = 0, list[str]()
    for file in files:
        try:
            source = source_of(_schema_and_tests(json.loads(file.read_text()))[0])
            grammar_compiler.compiled(source, vocabulary)
        except (Refused, GrammarRefused):
            continue
        known = world.hints(source)
        need = len(known.tokens or ()) + 1
        for seed, wish in enumerate(("anything", "opening", "text")):
            said = say(world, source, need + max(8, need // 4), wish, seed, known)
            count, cut = count + 1, cut + ([] if said.ended else [f"  {file.name}: {wish}"])
    yield f"{len(cut)} of {count} random walks were cut, with room for the shortest answer"
    yield from cut[:25]
