import pytest

from mlx_server.api.ollama import seconds_of
from mlx_server.errors import BadRequest
from tests.tables import cases


@cases
def test_durations(given: int | float | str, seconds: float) -> None:
    assert seconds_of(given) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "given", ["", "-", "m", "5 m", "5d", "--1", "1e5", "5m!", "nan", "inf", "٣m", "1m" * 50]
)
def test_what_is_no_duration(given: str) -> None:
    with pytest.raises(BadRequest, match="5m or 1h30m"):
        seconds_of(given)
