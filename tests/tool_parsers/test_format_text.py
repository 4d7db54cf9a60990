"""Text without quotes has the format that its schema names."""

import pytest

from mlx_server.schemas import report
from mlx_server.tool_parsers.value_rules import FORMATS
from tests.tool_parsers.block_grammars import allowed, pythonic, qwen

pytestmark = pytest.mark.tables


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ("date-time", ["2024-02-29T23:59:60Z", "2024-01-31t00:00:00.5+01:00"], ["2024-01-01"]),
        ("time", ["23:59:60Z", "00:00:00.25-05:30"], ["23:59:60", "24:00:00Z", "00:00:00z1"]),
        (
            "date",
            ["2024-01-31", "2024-04-30"],
            ["2024-02-30", "2024-04-31", "2024-13-01", "24-1-1"],
        ),
        ("duration", ["P1Y2M3D", "PT1H", "P2W", "P1DT1M2S"], ["P", "P1Y2D", "PT", "P1H", "P1W1D"]),
        ("email", ["a.b+c@d-e.fg", "a@[10.0.0.1]"], ["a@", "a b@c", "a..b@c", "a@b..c", "@c"]),
        ("hostname", ["a", "a-1.b2"], ["-a", "a-", "a..b", "a_b", "a" * 64]),
        ("ipv4", ["0.0.0.0", "255.199.10.9"], ["256.0.0.0", "1.1.1", "01.1.1.1"]),
        ("ipv6", ["::", "::1", "a::", "1:2:3:4:5:6:7:8", "1::3:4", "1:2::"], ["1", ":1", "1:::2"]),
        ("ipv6", ["1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8"], ["1:2:3:4:5:6:7", "1::2:3:4:5:6:7:8"]),
        ("uuid", ["0123abCD-0123-4567-89ab-0123456789ab"], ["0123abcd01234567 89ab0123456789ab"]),
        ("uri", ["http://a.b:1/c?d=e#f", "urn:a:b", "a:", "a:/b//c", "a://[::1]"], ["//a", "a:%g"]),
    ],
)
def test_bare_text_has_its_format(format: str, right: list[str], wrong: list[str]) -> None:
    said = {"x": {"type": "string", "format": format}}
    expected = [True] * len(right) + [False] * len(wrong)
    assert allowed("qwen3_coder", said, *map(qwen, right + wrong)) == expected
    assert allowed("lfm2", said, *map(pythonic, right + wrong)) == expected  # as JSON has it


def test_all_formats_that_json_holds_are_held_in_text() -> None:
    assert FORMATS.keys() == report.FORMATS
