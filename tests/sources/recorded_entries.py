"""Transcripts that a test writes, and the outputs that they give."""

import json
from pathlib import Path
from typing import Any

import yaml

from mlx_server.messages import Conversation, Message
from mlx_server.requests import Prompt
from mlx_server.sources.transcript import Transcript, read_transcript

VOCABULARY = 300


def written(folder: Path, entries: Any, suffix: str = ".yaml") -> Path:
    """Text as it is; entries in the way of the suffix."""
    path = folder / f"said{suffix}"
    if isinstance(entries, str):
        path.write_text(entries, "utf-8")
    elif suffix == ".yaml":
        path.write_text(yaml.safe_dump(entries, allow_unicode=True), "utf-8")
    else:
        lines = (json.dumps(entry, ensure_ascii=False) for entry in entries)
        path.write_text("\n".join(lines), "utf-8")
    return path


def read(folder: Path, entries: Any, suffix: str = ".yaml") -> Transcript:
    return read_transcript(written(folder, entries, suffix), VOCABULARY)


def said(text: str) -> Conversation:
    return Conversation((Message("user", text),))


def outputs(found: Transcript, *prompts: Prompt) -> list[str | None]:
    return [found.pick(prompt).entry.output for prompt in prompts]
