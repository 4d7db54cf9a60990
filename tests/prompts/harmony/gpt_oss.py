"""Prompts of gpt-oss, as tokens and as text."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_server.families.harmony import GPT_OSS
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.prompts.harmony.vocabulary import TOKENS, encoding, real_tokenizer
from mlx_server.sources.cache import cache_dir
from tests.families import write_checkpoint

DATE = {"conversation_start_date": "2025-06-28"}


def gpt_oss_checkpoint(folder: Path) -> Checkpoint:
    """One for all processes of a run, since its tokenizer takes seconds to make."""
    common = cache_dir() / "gpt-oss-for-tests"
    if not common.exists():
        write_checkpoint(folder, real_tokenizer(), config={"model_type": "gpt_oss"})
        common.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another process was first
            folder.rename(common)
    return read_checkpoint(common)


def tokens_of(gpt_oss: Checkpoint, conversation: Conversation) -> list[int]:
    return GPT_OSS.render(gpt_oss, conversation).tokens


def text_of(gpt_oss: Checkpoint, conversation: Conversation) -> str:
    return str(encoding().decode(tokens_of(gpt_oss, conversation)))


def said(text: str = "Hello", **more: Any) -> Conversation:
    return Conversation((Message("user", text, **more),), template_kwargs=DATE)


def called(
    id: str = "1", name: str = "f", arguments: str = "{}", tools: tuple[Tool, ...] = ()
) -> Conversation:
    call = ToolCall(id, name, arguments)
    result = Message("tool", "Hello", tool_call_id=id)
    asks = Message("assistant", tool_calls=(call,))
    return Conversation((asks, result), tools, template_kwargs=DATE)


def offered(name: str = "f", described: str = "d", /, **parameter: Any) -> Conversation:
    properties = {"properties": {"a": parameter}} if parameter else {}
    return replace(said(), tools=(Tool(name, described, properties),))


def formatted(**format: Any) -> Conversation:
    return replace(said(), response_format={"name": "x", "schema": {}, **format})


def control_tokens(gpt_oss: Checkpoint, conversation: Conversation) -> list[int]:
    return [token for token in tokens_of(gpt_oss, conversation) if token >= TOKENS]
