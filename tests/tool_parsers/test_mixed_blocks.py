"""Calls of tools that do not exist, next to calls of tools that do."""

import pytest

import mlx_server
from mlx_server.events import TextDelta, ToolCallStarted, Violation
from mlx_server.families import FAMILIES
from mlx_server.families.base import ModelFamily
from mlx_server.families.markup import MarkupFamily
from tests.families.goldens import Golden, goldens_of, tools

PYTHON = ("minicpm",)
"""Families in which a string that ends before an unknown call has an end that is in doubt."""


def with_several_calls(family: ModelFamily) -> list[Golden]:
    """Cases without slips, in marks: an unknown name in a bare list is no call at all."""
    marks = tuple(mark for each in family.layout_with(tools()).call_formats for mark in each.opens)
    return [
        case
        for case in goldens_of(family)
        if len({call.name for call in case.reads.calls}) > 1
        and not (case.cut or case.reads.repairs or case.reads.unmet)
        and any(mark in case.output for mark in marks)
    ]


CASES = [
    (family, case)
    for family in FAMILIES
    if isinstance(family, MarkupFamily)
    for case in with_several_calls(family)
]
every_case = pytest.mark.parametrize(
    ("family", "case"), CASES, ids=[f"{family.name}: {case.name}" for family, case in CASES]
)


@pytest.mark.slow
@every_case
def test_the_known_ones_are_called(family: ModelFamily, case: Golden) -> None:
    names = [call.name for call in case.reads.calls]
    for gone in names[:1] if family.name in PYTHON else (names[0], names[-1]):
        offered = [tool for tool in tools() if tool.name != gone]
        events = mlx_server.read(case.output, family.name, offered, prompt_end=case.prompt_end)
        called = [event.name for event in events if isinstance(event, ToolCallStarted)]
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        reports = [event.what for event in events if isinstance(event, Violation)]
        assert called == [name for name in names if name != gone]
        assert gone in text or any(repr(gone) in report for report in reports)
