"""Parses headers of Harmony messages, including those that OpenAI's parser can't read."""

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
"""Matches the words of a header after each control token, in the orders that models use."""


@dataclass(frozen=True)
class HarmonyHeader:
    channel: str | None = None
    recipient: str | None = None
    rest: str = ""
    """Text within the header that is not part of it."""
    broken: bool = False
    has_type: bool = False
    """Whether it names a content type, as the header of a call does."""

    def misplaced(self) -> tuple[RepairKind, ...]:
        """Repairs to report for a function call in this message."""
        in_reasoning: tuple[RepairKind, ...] = ("reasoning",) if self.channel == "analysis" else ()
        return (*in_reasoning, "unmarked") if self.broken else in_reasoning

    @property
    def phase(self) -> Phase:
        """Phase of the message's text; text for an unknown recipient is a final answer."""
        is_preamble = self.channel == "commentary" and not self.recipient
        return "commentary" if is_preamble else "final_answer"


def header_name(name: str) -> str:
    """Returns the name without characters that could end it within a header."""
    return re.sub(r"[\s<|>]+", "_", name)


def parse_header(sections: Iterable[tuple[str, str]]) -> HarmonyHeader:
    """Parses a header given as its control tokens, each with the text after it."""
    channel = recipient = None
    tokens, rest = [], []
    for token, text in sections:
        found = HEADER_WORDS[token].match(text)
        assert found, "every part of it is optional"
        *named, to = found.groups()
        channel = next(filter(None, named), channel)
        recipient = recipient or to
        tokens.append(token)
        rest.append(text[found.end() :])
    # OpenAI's parser rejects a content type without a recipient, which models write
    whole = tokens == [START, CHANNEL, CONSTRAIN] and not (to or any(rest))
    return HarmonyHeader(
        channel, recipient, "".join(rest), broken=not whole, has_type=CONSTRAIN in tokens
    )
