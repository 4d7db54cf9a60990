"""Reads EXPECTED.md: failures that are explained.

Each is a line of a list, `- suite, subject, test: why`. A subject * stands for any subject. A
fourth text is one that every complaint of the suite contains. The rest of the file is for human
readers.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance_parts.outcomes import Outcome

FILE = Path(__file__).parent / "EXPECTED.md"
LINE = re.compile(r"^- `([^`]+)`, `([^`]+)`, `([^`]+)`(?:, `([^`]+)`)?: (\S.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Known:
    suite: str
    subject: str
    test: str
    about: str
    why: str

    def explains(self, outcome: Outcome) -> bool:
        return (
            outcome.verdict == "failed"
            and (outcome.suite, outcome.test) == (self.suite, self.test)
            and self.subject in ("*", outcome.subject)
            and all(self.about in each for each in outcome.why)
        )


def expected() -> list[Known]:
    return [Known(*found.groups("")) for found in LINE.finditer(FILE.read_text("utf-8"))]


def explanation(outcome: Outcome, known: Iterable[Known]) -> str | None:
    return next((each.why for each in known if each.explains(outcome)), None)


def outdated(outcomes: Sequence[Outcome], known: Iterable[Known]) -> list[Known]:
    """Returns the explanations that explain nothing although their suite ran."""
    ran = {outcome.suite for outcome in outcomes if outcome.verdict != "skipped"}
    return [
        each
        for each in known
        if each.suite in ran and not any(each.explains(outcome) for outcome in outcomes)
    ]
