"""The headers of Harmony's messages, also those that OpenAI's parser can't read."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_server.events import RepairKind
from mlx_server.messages import Phase

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"

_CHANNEL = r"(analysis\b|commentary\b|final\b)?\s*"
_TYPE = r"(?:(?:json|code)\b\s*)?"
_TO = rf"{_TYPE}to=(\S*)\s*{_TYPE}"
HEADER_WORDS = {
    # without a recipient, a channel's name may be the first word of a text
    START: re.compile(rf"\s*(?:assistant\b)?\s*(?:{_CHANNEL}{_TO})?"),
    CHANNEL: re.compile(rf"\s*{_CHANNEL}(?:{_TO})?"),
    CONSTRAIN: re.compile(r"\s*(?:(?!to=)\w+)?\s*(?:to=(\S*))?\s*"),
}
"""What a header consists of, behind each of its marks, in the orders that models write it in."""


@dataclass(frozen=True)
class HarmonyHeader:
    channel: str | None = None
    recipient: str | None = None
    rest: str = ""
    """What is no part of a header, yet stands there."""
    broken: bool = False

    def misplaced(self) -> tuple[RepairKind, ...]:
        """What is odd about a function's call behind it."""
        in_reasoning: tuple[RepairKind, ...] = ("reasoning",) if self.channel == "analysis" else ()
        return (*in_reasoning, "unmarked") if self.broken else in_reasoning

    @property
    def phase(self) -> Phase:
        """Of the text behind it; what was meant for a tool that there is not ends a turn, too."""
        is_preamble = self.channel == "commentary" and not self.recipient
        return "commentary" if is_preamble else "final_answer"


def header_name(name: str) -> str:
    """A name without what could end it in a header."""
    return re.sub(r"[\s<|>]+", "_", name)


def parse_header(sections: Iterable[tuple[str, str]]) -> HarmonyHeader:
    """Of marks, each with the text behind it."""
    channel = recipient = None
    marks, rest = [], []
    for mark, text in sections:
        found = HEADER_WORDS[mark].match(text)
        assert found, "every part of it is optional"
        *named, to = found.groups()
        channel = next(filter(None, named), channel)
        recipient = recipient or to
        marks.append(mark)
        rest.append(text[found.end() :])
    # OpenAI's parser knows no content type without a recipient; the model does
    whole = marks == [START, CHANNEL, CONSTRAIN] and not (to or any(rest))
    return HarmonyHeader(channel, recipient, "".join(rest), broken=not whole)
