"""The rules around an answer are read off a grammar's source."""

import pytest

from mlx_server.worker.constrained_decoding.frame_tails import Spelled, frame_tails


@pytest.mark.parametrize(
    ("rules", "shortest"),
    [
        ('start: "ab" x\nx: "c" | "de"', "abc"),
        ('start: (x "?")? y\nx: "long"\ny: /[0-9]{2}/ "."{2}', "00.."),
        ("start: @0 T\nT: /(?s:.*)/", "{}"),
        ('start: T U\nT: /(?s:.*)/ & ("here" | "there")\nU: T & ~V\nV: "no"', "herehere"),
        ('start: x\nx: "(" x ")" | "y"', "y"),  # what uses itself is no way out
        ('start: "a"\n  | "bb" // longer\nother[lazy]: /x/', "a"),
        ("start: /a(?=b)/ | @1 | /cc/", "cc"),
    ],
)
def test_the_shortest_text(rules: str, shortest: str) -> None:
    found = frame_tails(rules, ["{}", None], Spelled())
    assert found is not None
    assert found.shortest == shortest
    assert shortest in found.tails


def test_an_instance_of_many_members_is_an_ending() -> None:
    instance = '{"a":0' + ',"aa":0' * 2_000 + "}"
    found = frame_tails('start: "<go>" @0', [instance], Spelled())
    assert found is not None
    assert {found.shortest, instance} <= {f"<go>{instance}", *found.tails}


@pytest.mark.parametrize(
    "rules", ["", "start: x", "start: /a(?=b)/", 'start: "a', "start: x\nx: x"]
)
def test_a_grammar_that_is_not_read(rules: str) -> None:
    assert frame_tails(rules, [], Spelled()) is None


def test_rules_that_call_each_other_in_very_many_ways_are_not_read() -> None:
    """Each way would be tried anew, and there are three times as many for each further rule."""
    others = [
        "\n".join(
            f"r{n}: " + " | ".join(f'"b" r{(n + k) % many}' for k in (1, 2, 3)) for n in range(many)
        )
        for many in (4, 14)
    ]
    read = [frame_tails(f'start: "a" | r0\n{rules}', [], Spelled()) for rules in others]
    assert read[0] is not None
    assert read[1] is None


def test_from_inside_a_thought_an_answer_is_completed() -> None:
    spelled = Spelled()
    found = frame_tails('start: ("to=self" <[7]> /(?s:.*)/ <[8,9]>)? "<go>" @0', ["{}"], spelled)
    assert found is not None
    assert found.shortest == "<go>{}"
    written = [spelled.parts(tail) for tail in found.tails]
    assert ["elf", 7, 8, "<go>{}"] in written
    assert [8, "<go>{}"] in written
    assert ["o>{}"] in written
