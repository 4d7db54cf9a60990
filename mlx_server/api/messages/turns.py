"""Converts the messages of a body to those that a family renders.

Messages of one role in a row are one turn, however their blocks are divided: text as a list in one
request and as a string in the next gives the same prompt, and so is found in the prompt cache.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_server.api.files import text_of_data
from mlx_server.api.messages.blocks import (
    AnthropicMessageParam,
    Block,
    CompactionBlock,
    DataSource,
    DocumentBlock,
    FileSource,
    HostedBlock,
    ImageBlock,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    Texts,
    TextSource,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolSearchBlock,
    ToolUseBlock,
)
from mlx_server.api.messages.effort import check_effort_only
from mlx_server.api.messages.tool_changes import ToolChanges
from mlx_server.api.signatures import Signer
from mlx_server.errors import BadRequest
from mlx_server.messages import Message, ToolCall

SUMMARY = "What was said before, in short:\n\n"
FAILED = "Error: "
"""Put before a result with `is_error`, since chat templates have no place for that flag."""

ONLY_TEXT = "these models read only text"
ROLES = {
    "tool_result": "user",
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
}
"""The role whose messages may have such a block; others may be in all of them."""


@dataclass
class Draft:
    """Text of the assistant, and the reasoning before it."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Turns:
    """Takes messages one by one; `messages` is complete after `end`."""

    def __init__(self, signer: Signer) -> None:
        self.messages: list[Message] = []
        self.tools = ToolChanges()
        self.ignored: dict[str, None] = {}
        self._signer = signer
        self._role = ""
        self._drafts: list[Draft] = []
        self._calls: list[ToolCall] = []
        self._results: list[Message] = []
        self._texts: list[str] = []
        self._known: dict[str, int] = {}
        """Number of each call, by its id."""

    def add(self, message: AnthropicMessageParam, where: str) -> None:
        if message.role != self._role or message.role == "system":
            self.end()
            self._role = message.role
        content = message.content
        if content is None:
            check_effort_only(message, where)
            return
        if isinstance(content, str):
            content = [TextBlock(type="text", text=content)]
        for i, block in enumerate(content):
            self._add(block, f"{where}.content[{i}]")

    def end(self) -> None:
        """Ends the turn: what was collected becomes messages."""
        match self._role:
            case "assistant":
                self.messages += self._answers()
            case "user":
                self._results.sort(key=lambda result: self._known[result.tool_call_id or ""])
                self.messages += self._results
                if self._texts or not self._results:
                    self.messages.append(Message("user", "\n".join(self._texts)))
            case "system" if self._texts:
                self.messages.append(Message("system", "\n".join(self._texts)))
        self._role = ""
        self._drafts, self._calls, self._results, self._texts = [], [], [], []

    def _answers(self) -> list[Message]:
        drafts, calls = self._drafts, tuple(self._calls)
        if calls or not drafts:  # results must directly follow their calls: one message
            drafts = [_merged(drafts)]
        return [
            Message(
                "assistant",
                "\n".join(draft.texts),
                reasoning="\n\n".join(draft.reasoning) or None,
                tool_calls=calls,
            )
            for draft in drafts
        ]

    def _add(self, block: Block, where: str) -> None:
        if ROLES.get(block.type, self._role) != self._role:
            raise BadRequest(
                f"`{where}` is a `{block.type}` block in a message of the role `{self._role}`; it "
                f"belongs in one of the role `{ROLES[block.type]}`.",
                param=where,
            )
        match block:
            case ToolResultBlock():
                self._result(block, where)
            case ToolUseBlock():
                self.tools.name(block.name)
                self._known.setdefault(block.id, len(self._known))
                arguments = json.dumps(block.input, ensure_ascii=False)
                extra = block.extra_content
                self._calls.append(ToolCall(block.id, block.name, arguments, extra_content=extra))
            case ThinkingBlock():
                self._think(block)
            case ToolSearchBlock():
                for found in block.content.tool_references or ():
                    self.tools.name(found.tool_name)
            case ToolAdditionBlock() | ToolRemovalBlock():
                self.tools.apply(block, where)
            case HostedBlock() | RedactedThinkingBlock():
                pass
            case CompactionBlock():
                for i, change in enumerate(block.tool_changes or ()):
                    self.tools.apply(change, f"{where}.tool_changes[{i}]")
                self._say(SUMMARY + block.content if block.content else "")
            case _:
                self._say(self._block_text(block, where))

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._role != "assistant":
            self._texts.append(text)
            return
        if not self._drafts:
            self._drafts.append(Draft())
        self._drafts[-1].texts.append(text)

    def _think(self, block: ThinkingBlock) -> None:
        signature = block.signature or ""
        thought = self._signer.opened(signature) or block.thinking
        if not self._signer.is_own(thought, signature):
            self.ignored["messages.content.signature"] = None
        if not thought:
            return
        if not self._drafts or self._drafts[-1].texts:
            self._drafts.append(Draft())
        self._drafts[-1].reasoning.append(thought)

    def _result(self, block: ToolResultBlock, where: str) -> None:
        if block.tool_use_id not in self._known:
            raise BadRequest(
                f"`{where}.tool_use_id` is {block.tool_use_id[:64]!r}, but no earlier `tool_use` "
                "block has this id.",
                param=f"{where}.tool_use_id",
            )
        content = block.content or ""
        if not isinstance(content, str):
            texts = (
                self._block_text(each, f"{where}.content[{i}]") for i, each in enumerate(content)
            )
            content = "\n".join(texts)
        if block.is_error:
            content = FAILED + content
        self._results.append(Message("tool", content, tool_call_id=block.tool_use_id))

    def _block_text(self, block: ResultBlock, where: str) -> str:
        match block:
            case TextBlock():
                return block.text
            case ImageBlock():
                raise _not_text(block.type, where)
            case SearchResultBlock():
                texts = (part.text for part in block.content)
                return "\n".join([block.title, block.source, *texts])
            case DocumentBlock():
                named = filter(None, (block.title, block.context))
                return "\n".join([*named, *_document(block, where)])
            case ToolReferenceBlock(tool_name=name):
                self.tools.name(name)
                return f"The tool {name} is available now."


def _document(block: DocumentBlock, where: str) -> list[str]:
    match block.source:
        case TextSource(data=text):
            return [text]
        case DataSource(media_type=kind, data=data):
            return [text_of_data(f"data:{kind};base64,{data}", f"{where}.source.data")]
        case FileSource(type=kind):
            raise _not_text(f"document` with a source of type `{kind}", where)
        case source:
            parts = source.content
    if isinstance(parts, str):
        return [parts]
    for i, part in enumerate(parts):
        if isinstance(part, ImageBlock):
            raise _not_text(part.type, f"{where}.source.content[{i}]")
    return [part.text for part in parts if isinstance(part, TextBlock)]


def _not_text(kind: str, where: str) -> BadRequest:
    return BadRequest(
        f"Content of type `{kind}` is not supported: {ONLY_TEXT}.", param=f"{where}.type"
    )


def _merged(drafts: Sequence[Draft]) -> Draft:
    texts = ["\n".join(draft.texts) for draft in drafts if draft.texts]
    reasoning = [thought for draft in drafts for thought in draft.reasoning]
    return Draft(reasoning, ["\n\n".join(texts)] if texts else [])


def turns_of(messages: Sequence[AnthropicMessageParam], signer: Signer) -> Turns:
    turns = Turns(signer)
    last_user = max((i for i, each in enumerate(messages) if each.role == "user"), default=-1)
    for i, message in enumerate(messages):
        is_cleared = message.clear_at == "next_user_message" and i < last_user
        if not (is_cleared and message.role == "system"):
            turns.add(message, f"messages[{i}]")
    turns.end()
    if not turns.messages:
        raise BadRequest("`messages` has no content: add a user message.", param="messages")
    return turns


def instructions(system: Texts | None) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(block.text for block in system or () if block.text)
