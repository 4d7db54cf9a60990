"""Each line of catalogue.yaml, through its family's parser however it is cut, and to its end."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from mlx_server.families import family_named
from mlx_server.generation.review import (
    CheckedAnswer,
    RawAnswer,
    Requirements,
    check_answer,
    schema_errors,
)
from mlx_server.requests import JsonFormat, RepairPolicy
from tests.families.goldens import Golden, Player, Reads, Yaml, folded, shown, tools


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    family: str
    output: str
    reads: Reads
    cut: bool = False
    schema: dict[str, Any] | None = None
    must_call: bool = False
    repair: dict[str, Any] = {}
    asked_again: list[str] = []
    """How each of the errors begins."""

    def played(self) -> Player:
        golden = Golden(self.name, self.output, self.reads, cut=self.cut)
        return Player(family_named(self.family), golden, RepairPolicy(**self.repair))


CASES = msgspec.convert(
    yaml.load(Path(__file__).with_name("catalogue.yaml").read_text("utf-8"), Yaml), list[Case]
)

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def ended(case: Case, reads: Reads) -> CheckedAnswer:
    said = RawAnswer(
        reads.text,
        reads.reasoning,
        len(reads.calls),
        "length" if case.cut else "stop",
        call_delimiters=family_named(case.family).call_delimiters(tools()),
    )
    asked = Requirements(
        JsonFormat(case.schema) if case.schema else None, "required" if case.must_call else "auto"
    )
    return check_answer(said, asked, RepairPolicy(**case.repair), schema_errors)


@pytest.mark.slow
@every_case
def test_what_comes_of_it(case: Case) -> None:
    for way, events in case.played().ways():
        reads = folded(events)
        end = ended(case, reads)
        mended = [*reads.repairs, *(f"{what} {where}" for what, where in end.repairs)]
        reads = msgspec.structs.replace(reads, text=end.text, repairs=mended)
        assert shown(reads, case.reads) == shown(case.reads, case.reads), way


@every_case
def test_whether_the_model_is_asked_again(case: Case) -> None:
    end = ended(case, folded(case.played().by_tokens()))
    pairs = zip(end.errors, case.asked_again, strict=True)
    assert all(error.startswith(begin) for error, begin in pairs), end.errors


def test_what_was_mended_is_never_told_in_the_models_words() -> None:
    for case in CASES:
        for repair in case.reads.repairs:
            what, where = repair.split()
            assert what.isalpha()
            assert where.removeprefix("tool_calls[0]") in (
                *("content", "reasoning_content", "", ".function.name"),
                *(f".function.arguments{key}" for key in ("", ".a")),
            )
