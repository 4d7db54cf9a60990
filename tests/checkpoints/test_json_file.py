"""JSON files as people save them."""

import json
from pathlib import Path

import pytest

from mlx_server.checkpoints.files import read_json, read_optional_json
from mlx_server.errors import ModelUnusable

VALUE = {"a": "é", "b": [1, None]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_any_unicode_is_read(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(json.dumps(VALUE, ensure_ascii=False).encode(encoding))
    assert read_json(file) == read_optional_json(file) == VALUE


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": 1,}', "is not valid JSON: .*line 1.*Download it again"),
        (b"", "is empty. Download it again"),
        (b"[]", "must contain a JSON object. Download it again"),
        (b"<html>", "is a web page, not the file itself"),
        (b'{"a": "\xe9"}', "is not valid JSON"),
    ],
)
def test_what_is_none_is_told_or_passed_over(
    tmp_path: Path, content: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ModelUnusable, match=rf"^x\.json {says}"):
        read_json(file)
    assert read_optional_json(file) == {}
    assert "x.json" in caplog.text
    assert "is used without this file" in caplog.text


def test_an_optional_file_may_be_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_optional_json(tmp_path / "x.json") == {}
    assert caplog.text == ""
    with pytest.raises(ModelUnusable, match=r"x\.json is missing"):
        read_json(tmp_path / "x.json")
