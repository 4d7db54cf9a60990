"""What a first request to gpt-oss waits for is in the log."""

import logging

import pytest

from mlx_server.prompts.harmony import vocabulary as harmony_vocabulary


def test_reading_the_vocabulary_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harmony_vocabulary, "_encoding", None)
    with caplog.at_level(logging.INFO, "mlx_server.families"):
        harmony_vocabulary.encoding()
        harmony_vocabulary.encoding()
    begin, end = caplog.messages
    assert begin == "reading gpt-oss's vocabulary"
    assert end.startswith(f"{begin} took ")
