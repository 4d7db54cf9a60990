"""The JSON-Schema-Test-Suite: what SUITE.md says is so, and nothing invalid gets through."""

from pathlib import Path

import pytest

from tests.grammars.suite import counted, table

pytestmark = pytest.mark.slow

REPORTED = Path(__file__).parent / "SUITE.md"

SHAPES_ONLY = {"optional/format/date-time", "optional/format/date", "optional/format/time"}
"""No regular expression of a date knows leap years, nor one of a time leap seconds."""
ELSEWHERE_UNDERSTOOD = {
    "format": "an annotation to the suite, a constraint to llguidance and to us",
    "optional/ecmascript-regex": r"\s is Unicode's, and control characters are not written",
    "optional/format/email": "no quoted local parts, no addresses for hosts",
    "optional/format/ipv6": "no IPv4 in the last two groups",
    "vocabulary": "metaschemas are not fetched: their vocabularies are all of 2020-12",
}


def test_nothing_invalid_is_taken_and_nothing_valid_refused_unless_listed() -> None:
    strict, loose = counted(strict=True), counted(strict=False)
    for counts in (strict, loose):
        taken = {name for name, count in counts.items() if count.invalid_taken}
        refused = {name for name, count in counts.items() if count.valid_refused}
        assert taken == SHAPES_ONLY
        assert refused == set(ELSEWHERE_UNDERSTOOD)
    assert table(strict, loose) in REPORTED.read_text(), "python -m tests.grammars.test_suite"


def text() -> str:
    reasons = "\n".join(f"- `{name}`: {why}." for name, why in ELSEWHERE_UNDERSTOOD.items())
    return "\n".join(
        (
            "# JSON-Schema-Test-Suite",
            "",
            "Draft 2020-12, as it comes with jsonschema 4.26.0 (MIT license, inside"
            " `data/draft2020-12.json.gz`), through mlx_server/grammars and llguidance. `refused`"
            " schemas are answered with 400; their texts are not tried. `valid` texts are valid and"
            " taken, `invalid` ones are invalid and not taken. Not strict, an invalid text may be"
            " taken where the answer lists the keyword as not enforced; it is not counted."
            " Keywords without a line are held in every case. Written by"
            " `python -m tests.grammars.test_suite`.",
            "",
            "Valid texts that are not taken:",
            "",
            reasons,
            "",
            "Invalid texts that are taken: dates of a 29 February and leap seconds at a wrong time,"
            " whose formats are checked by shape.",
            "",
            table(counted(strict=True), counted(strict=False)),
            "",
        )
    )


if __name__ == "__main__":
    REPORTED.write_text(text())
