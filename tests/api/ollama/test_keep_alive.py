import math

import pytest

from mlx_server.api.ollama import seconds_of
from mlx_server.errors import BadRequest


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0),
        ("0", 0),
        ("0s", 0),
        (300, 300),
        (1.5, 1.5),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        (".5s", 0.5),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (1e300, math.inf),
        (10**12, math.inf),
        (10**399, math.inf),
        (-(10**399), math.inf),
    ],
)
def test_durations(given: int | float | str, seconds: float) -> None:
    assert seconds_of(given) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "given", ["", "-", "m", "5 m", "5d", "--1", "1e5", "5m!", "nan", "inf", "٣m", "1m" * 50]
)
def test_what_is_no_duration(given: str) -> None:
    with pytest.raises(BadRequest, match="5m or 1h30m"):
        seconds_of(given)
