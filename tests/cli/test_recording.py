"""`mlx-server replay record --upstream`: another server's answers, and what is left of its keys."""

from pathlib import Path

import pytest

from mlx_server.families import family_named
from mlx_server.messages import Conversation, Message
from mlx_server.sources.transcript import read_transcript
from tests.cli.recording_upstream import KEY, Upstream, record
from tests.families.goldens import tokenizer_of


def test_a_recording_plays_in_any_family(
    tmp_path: Path, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    body = {"messages": [{"role": "user", "content": "call it"}], "temperature": 0}
    options = ("--api-key-env", "THEIR_KEY")
    result = record(tmp_path, upstream, [body, "say it", f"my key is {KEY}"], *options)
    assert result.exit_code == 0, result.output
    assert Upstream.asked[0] == (
        f"Bearer {KEY}",
        {**body, "model": "their/model", "stream": False},
    )
    text = (tmp_path / "said.yaml").read_text()
    assert KEY not in text + result.output
    assert "sk-" not in text
    found = read_transcript(tmp_path / "said.yaml", 1)
    entries = [
        found.pick(Conversation((Message("user", asked),))).entry
        for asked in ("call it", "say it", f"my key is {KEY}")
    ]
    called, said, _ = entries
    assert said.answer
    assert said.answer.text == "It is [removed]."
    tokenizer = tokenizer_of("qwen3")
    assert tokenizer.raw(called.tokens(tokenizer, family_named("qwen3"))) == (
        '<think>\nHm.\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
    )
    mistral = tokenizer_of("mistral")
    assert mistral.raw(called.tokens(mistral, family_named("mistral"))) == (
        '[THINK]Hm.[/THINK][TOOL_CALLS]f[ARGS]{"a": "é"}'
    )
