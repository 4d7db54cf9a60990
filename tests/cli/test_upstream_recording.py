"""Upstreams whose answers can't be recorded are named."""

from pathlib import Path

import pytest

from mlx_server.errors import ServerError, SettingsError
from tests.cli.recording_upstream import record
from tests.cli.running import NO_URLS


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nobody knows", r"refused request 2 \(HTTP 404\): No\."),
        ("never end", "The answer to request 2 is larger than 8 MiB"),
        ("break it", "The answer to request 2 is not in the format"),
    ],
)
def test_an_upstream_that_fails_is_named(
    tmp_path: Path, upstream: str, asked: str, message: str
) -> None:
    result = record(tmp_path, upstream, ["call it", asked])
    assert isinstance(result.exception, ServerError)
    with pytest.raises(ServerError, match=message):
        raise result.exception


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://[::1]:1"])
def test_an_upstream_that_is_not_there_is_named(tmp_path: Path, url: str) -> None:
    result = record(tmp_path, url, ["call it"])
    assert isinstance(result.exception, ServerError)
    assert "at --upstream did not answer request 1" in result.exception.message


@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_url_is_named(tmp_path: Path, url: str) -> None:
    result = record(tmp_path, url, ["call it"])
    assert isinstance(result.exception, SettingsError)
    assert result.exception.message.startswith("The URL after --upstream should be one like http")
    assert "hunter2" not in result.exception.message
