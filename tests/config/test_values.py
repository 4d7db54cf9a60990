"""Values that several settings have: sizes and paths."""

import pytest
from pydantic import TypeAdapter, ValidationError

from mlx_server.config.settings import Bytes, BytesOrNone, size_in_bytes


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("12GB", 12_000_000_000),
        ("800 MB", 800_000_000),
        ("1.5GB", 1_500_000_000),
        ("1.001MB", 1_001_000),
        ("0.29GB", 290_000_000),
        ("4.35GB", 4_350_000_000),
        ("0.0000001MB", 0),
        (4096, 4096),
        (None, None),
    ],
)
def test_a_size_is_exact_to_the_byte(size: object, nbytes: object) -> None:
    assert size_in_bytes(size) == nbytes


@pytest.mark.parametrize(
    "size",
    [
        *("12", "12 gb", "12GiB", "12TB", "GB", "-1GB", "1,5GB", ".5GB", "1.GB", "1e3GB", ""),
        *(" 1GB", "1GB\n", "1  GB", "nanGB", "infGB", "٣GB", "1_0GB", "9" * 400 + "GB"),
    ],
)
def test_what_is_no_size_says_what_one_is(size: str) -> None:
    for kind in (Bytes, BytesOrNone):
        with pytest.raises(ValidationError, match="should be a size such as 12GB or 800MB"):
            TypeAdapter(kind).validate_python(size)


def test_nothing_is_a_size_only_where_it_means_none() -> None:
    assert TypeAdapter(BytesOrNone).validate_python("0MB") == 0
    for size in (0, "0GB", "0.0000001MB", -1):
        with pytest.raises(ValidationError):
            TypeAdapter(Bytes).validate_python(size)
