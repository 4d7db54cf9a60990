"""Golden prompts: a conversation as a client sends it, and what each family makes of it.

The templates are of our own writing, each after the manners of its family's. A prompt is a .txt
next to the template, by the name of the conversation.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from mlx_server.api.chat_completions.input import ChatBody, to_request
from mlx_server.families import FAMILIES, family_named, fitted
from mlx_server.families.base import ModelFamily
from mlx_server.messages import Conversation
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.prompts.template_prompt import RenderedPrompt
from mlx_server.sources.replay_checkpoint import replay_checkpoint

GOLDEN = Path(__file__).parent / "golden"
CONVERSATIONS = GOLDEN / "conversations"


@dataclass(frozen=True)
class GoldenPrompt:
    family: str
    conversation: str

    def __str__(self) -> str:
        return f"{self.family}-{self.conversation}"

    @property
    def path(self) -> Path:
        return GOLDEN / self.family / f"{self.conversation}.txt"

    def rendered(self) -> RenderedPrompt:
        checkpoint = checkpoint_of(self.family)
        family = fitted(family_named(self.family), checkpoint)
        return family.render(checkpoint, conversation_named(self.conversation))

    def text(self) -> str:
        """The prompt, and below it what the family has no place for."""
        rendered = self.rendered()
        bytes_of = checkpoint_of(self.family).tokenizer.bytes_of
        prompt = b"".join(map(bytes_of, rendered.tokens)).decode()
        return prompt + "".join(f"\n(ignored: {name})" for name in rendered.ignored)


def golden_prompts() -> Iterator[GoldenPrompt]:
    """Of every family that has a golden template."""
    for family in FAMILIES:
        if template_of(family.name).is_file():
            for path in sorted(CONVERSATIONS.glob("*.json")):
                yield GoldenPrompt(family.name, path.stem)


def template_of(family: str) -> Path:
    return GOLDEN / family / "template.jinja"


@lru_cache
def conversation_named(name: str) -> Conversation:
    written = json.loads((CONVERSATIONS / f"{name}.json").read_text("utf-8"))
    if written.pop("tools", False):
        written["tools"] = yaml.safe_load((GOLDEN / "tools.yaml").read_text("utf-8"))
    (prompt,) = to_request(ChatBody.model_validate({"model": "m", **written})).prompts
    assert isinstance(prompt, Conversation)
    return prompt


@lru_cache(maxsize=1)
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="replayed-")


def checkpoint_folder(family: ModelFamily) -> Path:
    """Of the checkpoint that the family is replayed with."""
    return replay_checkpoint(Path(_scratch().name), family)


@lru_cache
def checkpoint_of(family: str) -> Checkpoint:
    """The one that the family is replayed with, and its golden template."""
    folder = checkpoint_folder(family_named(family))
    template = template_of(family)
    return read_checkpoint(folder, template.read_text("utf-8") if template.is_file() else None)
