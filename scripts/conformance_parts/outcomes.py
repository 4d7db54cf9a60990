"""The result of a suite's test, in a form that all suites share."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    suite: str
    subject: str
    """The model, or another name that distinguishes one run of the suite from another."""
    test: str
    verdict: Verdict
    why: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.subject, self.test
