"""The families' golden outputs, through their parsers, in tokens and in text cut at any size."""

import json

import msgspec
import pytest

from mlx_server.events import (
    ToolCallDelta,
    ToolCallFinished,
)
from mlx_server.families import FAMILIES
from mlx_server.families.base import ModelFamily
from tests.families.goldens import (
    Golden,
    Player,
    folded,
    goldens_of,
    outputs_of,
    shown,
)

CASES = [(family, case) for family in FAMILIES for case in goldens_of(family)]

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
every_case = pytest.mark.parametrize(
    ("family", "case"), CASES, ids=[f"{family.name}: {case.name}" for family, case in CASES]
)


@every_family
def test_every_family_has_golden_outputs(family: ModelFamily) -> None:
    names = [case.name for case in goldens_of(family)]
    assert names, f"{outputs_of(family)} is missing or empty"
    assert len(set(names)) == len(names), f"two cases of one name: {sorted(names)}"


@pytest.mark.slow
@every_case
def test_every_case_reads_the_same_however_it_is_cut(family: ModelFamily, case: Golden) -> None:
    wanted, player = shown(case.reads, case.reads), Player(family, case)
    # tokens of reasoning are counted by their place
    assert not case.reads.reasoning or "reasoning" in player.places()
    for way, events in player.ways():
        try:
            found = shown(folded(events), case.reads)
        except AssertionError as error:
            pytest.fail(f"{way}: {error}\n{case.output}")
        assert found == wanted, f"{way}:\n{case.output}"


SHOWN_IN_CODE = "a call that the answer shows in a block of code"
"""An answer that ends with such a call makes it, since some models put their calls into code."""


ENDS = 5
"""The most places at which one case ends; a family has some fourteen cases."""


@pytest.mark.slow
@every_family
def test_an_answer_that_ends_anywhere_shows_no_half_call_and_no_mark(family: ModelFamily) -> None:
    for case in goldens_of(family):
        shows_no_half_call_and_no_mark(family, case)


def shows_no_half_call_and_no_mark(family: ModelFamily, case: Golden) -> None:
    player = Player(family, case)
    whole = folded(player.by_tokens())
    unseen = {
        mark
        for mark in player.tokenizer.control_tokens.values()
        if mark not in whole.text + whole.reasoning
    }
    tokens = len(player.tokenizer.encode(case.output))
    step = 1 + tokens // ENDS
    for ended in range(1 + tokens % step, tokens, step):  # elsewhere in each case
        found = folded(player.ended_after(ended))
        made = [(call.name, call.arguments) for call in found.calls]
        if case.name != SHOWN_IN_CODE:
            wanted = [(call.name, call.arguments) for call in whole.calls[: len(made)]]
            assert made == wanted, f"{case.name}, ended after {ended}"
        seen = found.text + found.reasoning
        assert not [mark for mark in unseen if mark in seen], (case.name, ended, seen)


@pytest.mark.slow
@every_family
def test_a_stop_token_that_is_spelled_out_ends_any_answer(family: ModelFamily) -> None:
    for case in goldens_of(family):
        if case.cut or not case.by_text or Player(family, case).reads_token_ids:
            continue
        spelled = msgspec.structs.replace(
            case, output=case.output + "".join(family.stop_tokens[:1])
        )
        for size in (4, len(spelled.output)):
            found = shown(folded(Player(family, spelled).as_text(size)), case.reads)
            assert found == shown(case.reads, case.reads), f"{case.name}, cut at {size}"


TEXTS = ("path", "content", "query", "city")
"""Parameters of the golden tools that take any text."""


def pieces_of_long_texts(family: ModelFamily, case: Golden) -> list[tuple[int, int]]:
    """Of each whole call with a long text among its arguments: its length, and in how many pieces
    the arguments came."""
    arguments: dict[int, list[str]] = {}
    whole: set[int] = set()
    for event in Player(family, case).by_tokens():
        if isinstance(event, ToolCallDelta):
            arguments.setdefault(event.call, []).append(event.arguments)
        elif isinstance(event, ToolCallFinished):
            whole.add(event.call)
    found = [
        (json.loads("".join(pieces)), len(pieces)) for pieces in (arguments[call] for call in whole)
    ]
    lengths = [(max((len(made.get(k, "")) for k in TEXTS), default=0), n) for made, n in found]
    return [(length, pieces) for length, pieces in lengths if length >= 10]


@pytest.mark.slow
@every_family
def test_text_among_the_arguments_comes_as_it_is_written(family: ModelFamily) -> None:
    for case in goldens_of(family):
        for length, pieces in pieces_of_long_texts(family, case):
            assert pieces >= length / 6, case.name
