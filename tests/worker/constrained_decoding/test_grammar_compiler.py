"""Grammars are compiled a few at a time, while other rows go on, or refused in a line."""

import random
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.engine.messages import (
    Admitted,
    CancelRows,
    Grammar,
    LoadModel,
    StepOutput,
    Thinking,
    UnloadModel,
)
from mlx_server.grammars.compiler import LIMITS
from mlx_server.worker.constrained_decoding import grammar_compiler, mask_threads
from mlx_server.worker.constrained_decoding.grammar_compiler import SLOW_SECONDS
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.engine import Engine
from tests.clocks import Clock
from tests.worker.batch_runs import ids
from tests.worker.constrained_decoding.grammars import (
    DIGITS,
    ENDS,
    GRAMMARS,
    HEAD,
    JSON,
    WORDS,
    loaded,
    refusals,
    turned_away,
)
from tests.worker.constrained_decoding.worlds import World
from tests.worker.engine_runs import ask, drain, failures, grammar_of, of, run, tokens_of, until


def test_a_row_whose_next_step_would_cost_too_much_ends_alone(engine: Engine) -> None:
    variants = " | ".join(f'"{n}" T' for n in range(5000))
    asks = [ask(row, grammar=WORDS if row % 2 else None, tokens=9) for row in range(8)]
    before = run(engine, *asks)
    asks[3].grammar = grammar_of(f'{HEAD}start: /[a-z]{{4}}/ ":" ({variants})\nT: /[a-z]/\n')
    after = run(engine, *asks)
    assert {*failures(after)} == {3}
    assert f"max is {LIMITS.max_items_in_row}" in failures(after)[3]
    assert not refusals(after)
    for row in {*range(8)} - {3}:
        assert ids(tokens_of(row, after)) == ids(tokens_of(row, before))


REFUSED = {
    "start: foo\n": 'unknown name: "foo"',
    'start: "a\n': "lexer error",
    'start: start "a"\n': "no answer can match it",
    "start: /(?=a)/\n": "look-around, including look-ahead and look-behind, is not supported",
    "start: /(a/\n": "unclosed group",
    'start: %json {"not": {"type": "string"}}\n': 'Unimplemented keys: ["not"]',
    'start: %json {"type": "strin"}\n': "Invalid type: strin",
    'start: %json {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}\n': "no answer",
    "start: %json false\n": "Unsatisfiable schema",
    "start: <[310]>\n": "too large",
    "nothing at all": "",
    "": "",
    "\0": "",
    "start: " + "(" * 100_000 + "\n": "too deeply nested",
    "start: A\nA: " + " & ".join(f"/(a|b|{n})*a(a|b){{{n}}}/" for n in range(20, 24)): "fuel",
    "".join(f"r{i}: r{i + 1}\n" for i in range(20_000)): "rules",
    "start: %json " + '{"items":' * 9000 + "{}" + "}" * 9000 + "\n": "recursion limit",
}


@pytest.mark.parametrize("source", REFUSED, ids=range(len(REFUSED)))
def test_what_can_t_be_used_is_refused_in_a_line(engine: Engine, source: str) -> None:
    reports = run(engine, ask(0, grammar=source), ask(1))
    assert REFUSED[source] in refusals(reports)[0]
    assert 3 < len(refusals(reports)[0]) < 600
    assert not re.search(r"\n|<state>|\d+ \| |start:", refusals(reports)[0])
    assert not tokens_of(0, reports)
    assert len(tokens_of(1, reports)) == 5
    assert [admitted.row for admitted in of(Admitted, reports)] == [1]
    assert refusals(run(engine, ask(2, grammar=source)))[2] == refusals(reports)[0]


def test_rules_within_rules_do_not_end_the_process(engine: Engine) -> None:
    deep = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "ab"\n'
    reports = run(engine, ask(0, grammar=HEAD + deep, tokens=2))
    assert ids(tokens_of(0, reports)) or refusals(reports)


@pytest.mark.parametrize("file", ["missing", "damaged"])
def test_a_model_without_a_usable_tokenizer_answers_without_grammars(
    tiny_path: Path, tmp_path: Path, file: str
) -> None:
    for each in ("config.json", "model.safetensors"):
        (tmp_path / each).symlink_to(tiny_path / each)
    if file == "damaged":
        (tmp_path / "tokenizer.json").write_text("{")
    engine = loaded(tmp_path)
    thinking = Thinking(1, True, [], [b"x"], [1])
    reports = run(engine, ask(0), ask(1, grammar=DIGITS), ask(2, thinking=thinking))
    assert len(tokens_of(0, reports)) == 5
    assert {*refusals(reports)} == {1, 2}
    assert all("tokenizer.json" in message for message in refusals(reports).values())


def test_without_a_token_to_end_with_no_grammar_can_be_used(tiny_path: Path) -> None:
    engine = loaded(tiny_path, stops=[])
    thinking = Thinking(1, True, [], [b"x"], [1])
    reports = run(engine, ask(0, grammar=DIGITS), ask(1, thinking=thinking))
    assert "no known stop token" in refusals(reports)[0]
    assert len(tokens_of(1, reports)) == 5


class Gate:
    """Holds every compile back until it is opened, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.arrivals = threading.Semaphore(0)
        self.open = threading.Event()
        compile = grammar_compiler.compiled

        def held(
            grammar: Grammar, vocabulary: Vocabulary, prefix: Sequence[int]
        ) -> grammar_compiler.CompiledGrammar:
            self.begun.append(grammar.source)
            self.arrivals.release()
            assert self.open.wait(60)
            return compile(grammar, vocabulary, prefix)

        monkeypatch.setattr(grammar_compiler, "compiled", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def test_others_go_on_while_a_grammar_is_compiled(engine: Engine, gate: Gate) -> None:
    reports = engine.handle(ask(0, grammar=DIGITS)) + engine.handle(ask(1, tokens=50))
    reports += until(engine, lambda reports: len(tokens_of(1, reports)) == 50)
    assert [admitted.row for admitted in of(Admitted, reports)] == [1]
    assert {step.waiting for step in of(StepOutput, reports)[1:]} == {1}
    assert engine.pause
    assert 0 < engine.pause <= limits.COMPILE_SECONDS
    gate.open.set()
    assert tokens_of(0, drain(engine))


def test_two_at_a_time_and_each_once(engine: Engine, gate: Gate) -> None:
    asks = [ask(row, grammar=GRAMMARS[row % 3], tokens=3) for row in range(9)]
    for asked in asks:
        assert not engine.handle(asked)
    for _ in range(2):
        while not gate.arrivals.acquire(timeout=0.01):
            engine.step()
    engine.step()
    assert {*gate.begun} == {DIGITS, WORDS}
    assert len(gate.begun) == limits.COMPILE_THREADS
    gate.open.set()
    reports = drain(engine)
    assert all(1 <= len(tokens_of(row, reports)) <= 3 for row in range(9))
    run(engine, *asks)
    assert sorted(gate.begun) == sorted([DIGITS, WORDS, JSON])


def test_the_oldest_of_many_grammars_are_forgotten(
    engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COMPILED_GRAMMARS", 2)
    gate.open.set()
    for source in (DIGITS, WORDS, DIGITS, JSON, DIGITS, WORDS):
        run(engine, ask(0, grammar=source))
    assert gate.begun == [DIGITS, WORDS, JSON, WORDS]


def test_rows_that_wait_for_a_grammar_can_be_cancelled(engine: Engine, gate: Gate) -> None:
    engine.handle(ask(0, grammar=DIGITS))
    (left,) = engine.handle(CancelRows([0]))
    assert isinstance(left, StepOutput)
    assert left.waiting == 0
    assert engine.pause is None
    gate.open.set()
    assert not tokens_of(0, run(engine, ask(1)))


def test_rows_that_wait_for_a_grammar_go_with_their_model(engine: Engine, gate: Gate) -> None:
    engine.handle(ask(0, grammar=DIGITS))
    assert {*failures(engine.handle(UnloadModel("tiny")))} == {0}
    assert engine.pause is None
    gate.open.set()
    assert drain(engine) == []


def test_what_takes_too_long_is_turned_away_but_not_refused(
    engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = limits.COMPILE_SECONDS
    monkeypatch.setattr(limits, "COMPILE_SECONDS", 0.01)
    reports = run(engine, ask(0, grammar=DIGITS), ask(1, grammar=DIGITS))
    assert {*turned_away(reports)} == {0, 1}
    assert not refusals(reports)  # how long it takes depends on what else the machine does
    run(engine, ask(2, grammar=WORDS))
    reports = run(engine, ask(3, grammar=JSON))
    assert {*turned_away(reports)} == {3}  # no thread can be stopped
    assert not failures(reports)
    monkeypatch.setattr(limits, "COMPILE_SECONDS", patience)
    gate.open.set()
    assert len(tokens_of(4, run(engine, ask(4, grammar=DIGITS)))) == 5
    assert len(tokens_of(5, run(engine, ask(5, grammar=JSON)))) == 5


def test_slow_grammars_of_some_clients_keep_no_other_waiting(tiny_path: Path, gate: Gate) -> None:
    """Each of them has had both threads for itself, and has more grammars than that."""
    clock = Clock(tick=1e-6)
    engine = Engine(clock=clock)
    engine.handle(LoadModel("tiny", str(tiny_path), ENDS))
    drain(engine)
    slow = [
        ask(row, grammar=f'{HEAD}start: "{row}"\n', client=client)
        for row, client in enumerate("aaaabbbb")
    ]
    for asked in slow:
        engine.handle(asked)
    for _ in range(8):  # the next ones begin when those before turn out to be slow
        clock.now += SLOW_SECONDS
        assert not turned_away(engine.step())
    begun = [source[-3] for source in gate.begun]
    assert sorted(begun) == ["0", "1", "4", "5"]
    assert not engine.handle(ask(8, grammar=DIGITS, client="c"))
    for _ in begun:
        assert gate.arrivals.acquire(timeout=60)
    assert gate.arrivals.acquire(timeout=60)
    assert gate.begun[4:] == [DIGITS]
    gate.open.set()
    assert tokens_of(8, drain(engine))


def test_very_many_slow_grammars_are_not_compiled_at_the_same_time(
    tiny_path: Path, gate: Gate
) -> None:
    clock = Clock(tick=1e-6)
    engine = Engine(clock=clock)
    engine.handle(LoadModel("tiny", str(tiny_path), ENDS))
    drain(engine)
    for row in range(20):
        engine.handle(ask(row, grammar=f'{HEAD}start: "{row}"\n', client=f"{row}"))
        clock.now += SLOW_SECONDS / 2
        assert not turned_away(engine.step()) or row > 9
    assert len(gate.begun) == limits.SLOW_COMPILE_THREADS
    clock.now += limits.COMPILE_SECONDS
    assert {*range(8, 20)} <= {*turned_away(engine.step())}


AMBIGUOUS = HEAD + 'start: s\ns: "a" | "b" | s s | s s s\n'


@pytest.mark.parametrize("grammar", [AMBIGUOUS, WORDS, JSON], ids=["ambiguous", "words", "json"])
def test_a_slow_matcher_answers_as_a_quick_one(
    demo: World, grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_threads, "SLOW_SECONDS", -1.0)
    quick, slow = (demo.matcher(Grammar(grammar)), YieldingMatcher(demo.matcher(Grammar(grammar))))
    dice = random.Random(grammar)
    for _ in range(12):
        mask = quick.compute_bitmask()
        allowed = [id for id in range(len(demo.text)) if mask[id >> 3] >> (id & 7) & 1]
        for length in (1, 2, 5):
            tokens = [dice.choice(allowed) for _ in range(length)]
            tokens += [dice.randrange(len(demo.text)), demo.stop][: dice.randrange(3)]
            assert slow.validate_tokens(tokens) == quick.validate_tokens(tokens), tokens
        assert slow.own.is_accepting() == quick.is_accepting()
        token = dice.choice([id for id in allowed if id != demo.stop] or allowed)
        assert slow.consume_token(token) == quick.consume_token(token)
        assert slow.own.deep_copy().compute_bitmask() == quick.deep_copy().compute_bitmask()
    assert slow.is_slow
    assert not slow.consume_token(next(id for id in range(3) if id not in allowed))
    assert slow.own.is_error()
