"""A row that generates the same tokens over and over is ended; what repeats itself for good reasons
is not."""

import base64
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlx_server.engine.messages import Generate, LoadModel, Thinking
from mlx_server.loops import LONGEST_PERIOD, LoopDetector, TextLoopDetector
from mlx_server.requests import SamplingParams
from mlx_server.worker.engine import Engine
from tests.calls import calls_of
from tests.tiny import IM_END, IM_START
from tests.worker.batch_runs import a_prompt
from tests.worker.constrained_decoding.grammars import HEAD
from tests.worker.engine_runs import drain, failures, grammar_of, run, tokens_of

REPEATS = 6

LOOPS = {
    "a sentence": "I think that is all there is to say about it, my friend. ",
    "a row": "| Apple | 1.20 | red | ripe | yes |\n",
    "a thought": "Wait, let me check once more. The question asks for the capital of France, which "
    "is Paris. But is it? It may be a trick. Hmm. I know that Paris has been that for long. ",
    "a call": '<tool_call>{"name": "read", "arguments": {"path": "a.txt"}}</tool_call>\n',
    "sentences with one of their own at the end": "Yes, it is right so. " * 7
    + "Or it is not, is it? ",
}


def found(ids: Sequence[int], repeats: int = REPEATS) -> tuple[int, int] | None:
    """After how many tokens a loop is found, and how long its period is."""
    detector = LoopDetector(repeats)
    for count, token in enumerate(ids, 1):
        if detector.add(token):
            return count, detector.period
    return None


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_path / "tokenizer.json"))


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("before", ["", "Here it comes: | Apple | 1.20 | red"])
@pytest.mark.parametrize("what", LOOPS)
def test_loops_are_found(tokenizer: Tokenizer, what: str, before: str) -> None:
    at = found(text_ids(tokenizer, before + LOOPS[what] * 400))
    assert at is not None
    count, period = at
    one = len(text_ids(tokenizer, LOOPS[what] * 11)) - len(text_ids(tokenizer, LOOPS[what] * 10))
    assert period == one
    most = len(text_ids(tokenizer, before)) + REPEATS * max(period, 256) + 64
    assert REPEATS * 256 <= count <= most


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 9, 700, LONGEST_PERIOD - 1])
@pytest.mark.parametrize("repeats", [2, 6])
def test_it_takes_as_many_repeats_as_are_set(period: int, repeats: int) -> None:
    """Of a period by its length; of a short one, more; of a few different tokens, more still."""
    dice = random.Random(period)
    before, once = (dice.sample(range(1000, 50_000), count) for count in (500, period))
    least = 700 if period <= 8 else 256
    at = found([*before, *once * 5000], repeats)
    assert at == (500 + repeats * max(period, least), period)


def test_a_loop_that_is_left_is_none() -> None:
    once, other = list(range(300)), 1000
    assert found([*once * 5, other] * 3) is None
    assert found([*once * 5, other, *once * 8]) is not None
    counted = [[*once[:20], other + number] for number in range(2000)]
    assert found([token for line in counted for token in line]) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_period_with_repeats_within_is_found_all_the_same(seed: int) -> None:
    """Of two tokens in random order, where nearly all that follows one another comes again."""
    dice = random.Random(seed)
    once = [dice.randint(0, 1) for _ in range(dice.randint(60, 900))]
    at = found(once * 200)
    assert at is not None
    assert len(once) % at[1] == 0 or at[1] % len(once) == 0


WORDS = (
    *("apple", "river", "stone", "cloud", "table", "green", "seven", "quick", "north", "light"),
    *("paper", "winter", "garden", "copper", "silver", "morning", "harbour", "bridge", "letter"),
)

Maker = Callable[[random.Random], str]


def _table(dice: random.Random) -> str:
    columns = dice.randint(2, 7)
    kinds = [dice.choice(["number", "word", "yes", "empty"]) for _ in range(columns)]
    cells: dict[str, Callable[[], str]] = {
        "number": lambda: str(dice.randint(0, 9)),
        "word": lambda: dice.choice(WORDS),
        "yes": lambda: dice.choice(["yes", "no"]),
        "empty": lambda: "",
    }
    rows = [[cells[kind]() for kind in kinds] for _ in range(dice.randint(40, 150))]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["|" + "---|" * columns, *lines])


def _code(dice: random.Random) -> str:
    shape = dice.choice(
        [
            "    self.{0} = {0}\n",
            "assert parse('{0}') == '{0}'\n",
            "INSERT INTO t (a, b, c) VALUES ({1}, 0, NULL);\n",
            "  {{ id: {1}, name: '', value: 0, active: false }},\n",
            "mov eax, [ebp-{1}]\n",
            '<li><a href="/{0}">{0}</a></li>\n',
            "export const {0} = createSelector(state => state.{0});\n",
        ]
    )
    names = [f"{dice.choice(WORDS)}_{dice.choice(WORDS)}" for _ in range(dice.randint(30, 120))]
    return "".join(shape.format(name, number) for number, name in enumerate(names))


def _numbers(dice: random.Random) -> str:
    count = dice.randint(200, 700)
    kind = dice.choice(["up", "bits", "zeros", "floats", "primes"])
    values = {
        "up": [str(n) for n in range(count)],
        "bits": [str(dice.randint(0, 1)) for _ in range(count)],
        "zeros": ["0"] * count,
        "floats": [f"{dice.random():.3f}" for _ in range(count // 2)],
        "primes": [str(n) for n in range(2, count) if all(n % d for d in range(2, n))],
    }
    return dice.choice([", ", "\n", " "]).join(values[kind])


def _poem(dice: random.Random) -> str:
    refrain = " ".join(dice.choices(WORDS, k=8)) + ",\n"
    verses = []
    for _ in range(dice.randint(6, 20)):
        lines = [" ".join(dice.choices(WORDS, k=6)) + ",\n" for _ in range(3)]
        verses.append("".join(lines) + refrain * dice.randint(1, 4) + "\n")
    return "".join(verses)


def _base64(dice: random.Random) -> str:
    size = dice.randint(300, 1500)
    return base64.b64encode(dice.choice([bytes(size), dice.randbytes(size)])).decode()


def _json(dice: random.Random) -> str:
    one: dict[str, object] = {
        word: dice.choice([0, "", None, [], 1.5]) for word in dice.sample(WORDS, 4)
    }
    same = [one] * dice.randint(10, 25)
    counted = [{**one, "id": number} for number in range(dice.randint(20, 60))]
    value = dice.choice([same, counted, [[0] * 10] * 20, [[dice.randint(0, 1)] * 8] * 30])
    return json.dumps(value, indent=dice.choice([None, 2]))


def _lines(dice: random.Random) -> str:
    """What a pupil has to write a hundred times; one word for a long while; a picture of signs."""
    sentence = " ".join(dice.choices(WORDS, k=dice.randint(4, 8))) + ".\n"
    signs = dice.choice("#*-=.o ") * dice.randint(20, 60) + "\n"
    return dice.choice([sentence * 100, sentence.split()[0] * 300, signs * dice.randint(10, 40)])


def _matrix(dice: random.Random) -> str:
    size = dice.randint(8, 24)
    rows = [[int(row == column) for column in range(size)] for row in range(size)]
    if dice.random() < 0.5:
        rows = [[0] * size] * size
    return "[" + ",\n".join(str(row) for row in rows) + "]"


MAKERS: tuple[Maker, ...] = (*(_table, _code, _numbers, _poem, _base64, _json, _lines, _matrix),)


def samples(each: int) -> Iterator[tuple[str, str]]:
    """Yields what kind of text it is, and the text; `each` of every kind."""
    for maker in MAKERS:
        for seed in range(each):
            yield f"{maker.__name__}, {seed}", maker(random.Random(seed))


@pytest.mark.slow
def test_honest_repetition_is_no_loop(tokenizer: Tokenizer) -> None:
    alarms, count = {}, 0
    for kind, text in samples(12):
        count += 1
        if at := found(text_ids(tokenizer, text)) or words_until_loop(text):
            alarms[kind] = at
    assert count == 96
    assert not alarms


def test_a_short_answer_pays_next_to_nothing() -> None:
    detector = LoopDetector(REPEATS)
    calls = calls_of(lambda: [detector.add(token) for token in range(300)])
    assert calls < 4 * 300, "0.04 ms; with each token read it takes ten times as long"


def words_until_loop(text: str, size: int = 50) -> tuple[int, int] | None:
    """After how many characters a loop is found in a text of pieces, and its period in words."""
    detector = TextLoopDetector(REPEATS)
    for end in range(size, len(text) + size, size):
        if detector.add(text[end - size : end]):
            return end, detector.period
    return None


@pytest.mark.parametrize("what", LOOPS)
def test_loops_of_words_are_found_however_a_text_is_cut(what: str) -> None:
    text = "Here it comes: " + LOOPS[what] * 400
    one_by_one = words_until_loop(text, 1)
    assert one_by_one
    end, period = one_by_one
    assert end < 15 + REPEATS * (256 * 12 + len(LOOPS[what]))
    for size in (7, 50, 4096):
        at = words_until_loop(text, size)
        assert at == (-(-end // size) * size, period)


def row(
    number: int,
    output: list[int],
    *,
    loops: int | None = 2,
    tokens: int = 1600,
    grammar: str | None = None,
    **fields: Any,
) -> Generate:
    prompt, greedy = a_prompt(6, seed=number), SamplingParams(temperature=0)
    fields = {"sampling": greedy, "forced_tokens": output, "loops": loops, **fields}
    fields["grammar"] = grammar_of(grammar)
    return Generate(number, "m", prompt, max_tokens=tokens, stop_tokens=[IM_END], **fields)


@pytest.fixture
def engine(tiny_path: Path, tmp_path: Path) -> Engine:
    """Plays what its rows are to generate."""
    (tmp_path / "config.json").write_text('{"model_type": "replay", "vocab_size": 320}')
    (tmp_path / "tokenizer.json").write_text((tiny_path / "tokenizer.json").read_text())
    return loaded(tmp_path)


def loaded(path: Path) -> Engine:
    engine = Engine(concurrency=4)
    engine.handle(LoadModel("m", str(path), [IM_END]))
    drain(engine)
    return engine


ONCE = list(range(40, 60))
LOOP = [*range(60, 90), *ONCE * 300]
END = 30 + 2 * 256
"""The tokens after which that row is a loop, if two repeats make one."""


def test_a_loop_ends_its_row_alone(engine: Engine) -> None:
    honest = [*random.Random(1).choices(ONCE, k=1500), IM_END]
    asks = [row(0, LOOP), row(1, honest), row(2, LOOP, loops=None), row(3, LOOP, loops=3)]
    reports = run(engine, *asks, row(4, LOOP, generated=LOOP[: END - 1]))
    assert not failures(reports)
    answers = [tokens_of(number, reports) for number in range(4)]
    assert [(token.finish, token.looped) for token in tokens_of(4, reports)] == [("stop", 20)]
    assert [len(answer) for answer in answers] == [END, len(honest), 1600, END + 256]
    ends = [(answer[-1].finish, answer[-1].looped) for answer in answers]
    assert ends == [("stop", 20), ("stop", 0), ("length", 0), ("stop", 20)]
    assert [token.id for token in answers[0]] == LOOP[:END]
    assert [token.id for token in answers[1]] == honest


@pytest.mark.parametrize(
    ("grammar", "tokens"), [("start: /(?s:.*)/", END), ("start: /(?s:.{1000,})/", 1000)]
)
def test_what_a_grammar_demands_is_no_loop(engine: Engine, grammar: str, tokens: int) -> None:
    reports = run(engine, row(0, LOOP, tokens=8000, grammar=grammar + "\n"))
    assert not failures(reports)
    answer = tokens_of(0, reports)
    assert len(answer) == tokens


@pytest.mark.slow
def test_a_loop_in_a_string_ends_the_string_and_what_is_around_it(tiny_path: Path) -> None:
    always = SamplingParams(temperature=0, logit_bias={3 + ord("a") - ord("!"): 90.0})
    rules = """start: "[['" "abcdefghijkl"* "'],[" N ("," N)* "]]"\nN: /[0-9]+/\n"""
    asked = row(0, [], forced_tokens=None, sampling=always, tokens=8000, grammar=HEAD + rules)
    reports = run(loaded(tiny_path), asked)
    assert not failures(reports)
    tokens = tokens_of(0, reports)
    said = "".join(chr(token.id - 3 + ord("!")) for token in tokens[:-1])
    count = said.count("abcdefghijkl")
    assert said == "[['" + "abcdefghijkl" * count + "'],[0]]"
    assert 2 * 256 <= 12 * count <= 2 * 256 + 24
    assert [token.looped for token in tokens if token.looped or token.finish] == [12]
    assert tokens[-1].finish == "stop"


@pytest.mark.slow
def test_reasoning_is_ended_where_an_answer_is_demanded(tiny_path: Path) -> None:
    close, first = IM_START, 3 + ord("a") - ord("!")
    only = SamplingParams(temperature=0, logit_bias={first: 90.0})
    asked = row(
        0,
        [],
        forced_tokens=None,
        sampling=only,
        grammar=f'{HEAD}start: ("abcdefghijkl")+ <[{close}]> "XYZ"\n',
        thinking=Thinking(None, True, [b"\xff[0]"], [b"\xff[1]"], [close]),
    )
    reports = run(loaded(tiny_path), asked)
    assert not failures(reports)
    tokens = tokens_of(0, reports)
    assert [at for at, token in enumerate(tokens) if token.looped] == [2 * 256 - 1]
    assert [token.id for token in tokens].index(close) == 516
    assert tokens[-1].finish == "stop"
    assert not tokens[-1].looped
