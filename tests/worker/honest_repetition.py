"""Texts that repeat themselves for good reasons, as people ask models for them."""

import base64
import json
import random
from collections.abc import Callable, Iterator

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
