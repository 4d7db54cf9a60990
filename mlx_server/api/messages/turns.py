"""Converts the messages of a body to those that a family renders.

Messages of one role in a row are one turn, however their blocks are divided: text as a list in one
request and as a string in the next gives the same prompt, and so is found in the prompt cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_server.api import media
from mlx_server.api.content import OtherPart, path_to
from mlx_server.api.files import FileData, content_of_data, content_of_file
from mlx_server.api.messages.blocks import (
    AnthropicMessageParam,
    Block,
    CompactionBlock,
    ContentSource,
    DataSource,
    DocumentBlock,
    FileSource,
    HostedBlock,
    MediaBlock,
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
from mlx_server.api.messages.tool_changes import ToolChanges
from mlx_server.api.signatures import Signer
from mlx_server.errors import BadRequest
from mlx_server.messages import (
    UNNAMED,
    ContentPart,
    Media,
    Message,
    Role,
    ToolCall,
    content_of,
    media_parts,
)

SUMMARY = "What was said before, in short:\n\n"
FAILED = "Error: "
"""Put before a result with `is_error`, since chat templates have no place for that flag."""

ROLES = {
    "tool_result": "user",
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
}
"""The role to which such a block belongs, wherever it is; others belong to their message's."""


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
        self._parts: list[ContentPart] = []
        self._known: dict[str, int] = {}
        """Number of each call, by its id."""

    def add(self, message: AnthropicMessageParam, where: str) -> None:
        self._begin(message.speaker)
        content = message.content
        if isinstance(content, str):
            content = [TextBlock(type="text", text=content)]
        for i, block in enumerate(content or ()):
            role = ROLES.get(block.type, message.speaker)
            if role != self._role:
                self._begin(role)
            self._add(block, f"{where}.content[{i}]")

    def _begin(self, role: str) -> None:
        if role != self._role or role == "system":
            self.end()
            self._role = role

    def end(self) -> None:
        """Ends the turn: what was collected becomes messages."""
        match self._role:
            case "assistant":
                self.messages += self._answers()
            case "user":
                last = len(self._known)
                self._results.sort(key=lambda each: self._known.get(each.tool_call_id or "", last))
                self.messages += self._results
                if self._parts or not self._results:
                    self._say_as("user")
            case "system" if self._parts:
                self._say_as("system")
        self._role = ""
        self._drafts, self._calls, self._results, self._parts = [], [], [], []

    def _say_as(self, role: Role) -> None:
        parts = self._parts
        self.messages.append(Message(role, content_of(parts), parts=media_parts(parts)))

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
        match block:
            case TextBlock():
                self._say(block.text or "")
            case ToolResultBlock():
                self._result(block, where)
            case ToolUseBlock():
                id, name = block.id or "", block.name or UNNAMED
                self.tools.name(name)
                self._known.setdefault(id, len(self._known))
                arguments = block.input or "{}"
                extra = block.extra_content
                self._calls.append(ToolCall(id, name, arguments, extra_content=extra))
            case ThinkingBlock():
                self._think(block)
            case ToolSearchBlock():
                for found in block.content.tool_references or ():
                    self.tools.name(found.tool_name)
            case ToolAdditionBlock() | ToolRemovalBlock():
                self.tools.apply(block)
            case HostedBlock() | RedactedThinkingBlock():
                pass
            case OtherPart() if not block.text:
                pass
            case CompactionBlock():
                for change in block.tool_changes or ():
                    self.tools.apply(change)
                self._say(SUMMARY + block.content if block.content else "")
            case _:
                for part in self._block_parts(block, where):
                    self._say(part)

    def _say(self, part: ContentPart) -> None:
        if not part:
            return
        if self._role != "assistant":
            self._parts.append(part)
            return
        if not self._drafts:
            self._drafts.append(Draft())
        if isinstance(part, Media):
            self.ignored[part.place] = None
            part = part.line
        self._drafts[-1].texts.append(part)

    def _think(self, block: ThinkingBlock) -> None:
        signature = block.signature or ""
        thought = self._signer.opened(signature) or block.thinking or ""
        if not self._signer.is_own(thought, signature):
            self.ignored["messages.content.signature"] = None
        if not thought:
            return
        if not self._drafts or self._drafts[-1].texts:
            self._drafts.append(Draft())
        self._drafts[-1].reasoning.append(thought)

    def _result(self, block: ToolResultBlock, where: str) -> None:
        parts: list[ContentPart] = []
        if isinstance(block.content, str):
            parts.append(block.content)
        else:
            for i, each in enumerate(block.content or ()):
                parts += self._block_parts(each, f"{where}.content[{i}]")
        content = content_of(parts)
        if block.is_error in (True, "true"):
            content, parts = FAILED + content, [FAILED.strip(), *parts]
        id = block.tool_use_id
        self._results.append(Message("tool", content, tool_call_id=id, parts=media_parts(parts)))

    def _block_parts(self, block: ResultBlock, where: str) -> Sequence[ContentPart]:
        match block:
            case TextBlock() | OtherPart():
                return [block.text or ""]
            case MediaBlock():
                return [_medium(block, where)]
            case SearchResultBlock():
                texts = (block.title or "", block.source or "", instructions(block.content))
                return ["\n".join(filter(None, texts))]
            case DocumentBlock():
                named = filter(None, (block.title, block.context))
                return [*named, *_document(block, path_to(where, block.type))]
            case ToolReferenceBlock(tool_name=name):
                self.tools.name(name)
                return [f"The tool {name} is available now."]


def _medium(block: MediaBlock, where: str) -> Media:
    kind = media.kind_of(block.type) or "file"
    return media.of_part(kind, block.model_extra or {}, path_to(where, block.type))


def _document(block: DocumentBlock, place: str) -> Sequence[ContentPart]:
    match block.source:
        case TextSource(data=text):
            return [text or ""]
        case DataSource(media_type=kind, data=data):
            return [content_of_data(f"data:{kind or ''};base64,{data or ''}", place)]
        case FileSource() as elsewhere:
            known = [each for each in (elsewhere.url, elsewhere.file_id) if isinstance(each, str)]
            return [content_of_file(FileData(filename=" ".join(known)), place)]
        case ContentSource(content=parts):
            pass
        case None:
            return []
    if isinstance(parts, str):
        return [parts]
    return [_medium(p, place) if isinstance(p, MediaBlock) else p.text or "" for p in parts]


def _merged(drafts: Sequence[Draft]) -> Draft:
    texts = ["\n".join(draft.texts) for draft in drafts if draft.texts]
    reasoning = [thought for draft in drafts for thought in draft.reasoning]
    return Draft(reasoning, ["\n\n".join(texts)] if texts else [])


def turns_of(messages: Sequence[AnthropicMessageParam], signer: Signer) -> Turns:
    turns = Turns(signer)
    last_user = max((i for i, each in enumerate(messages) if each.speaker == "user"), default=-1)
    for i, message in enumerate(messages):
        is_cleared = message.clear_at == "next_user_message" and i < last_user
        if not (is_cleared and message.speaker == "system"):
            turns.add(message, f"messages[{i}]")
    turns.end()
    if not turns.messages:
        raise BadRequest("`messages` has no content: add a user message.", param="messages")
    return turns


def instructions(system: Texts | None) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(block.text for block in system or () if block.text)
