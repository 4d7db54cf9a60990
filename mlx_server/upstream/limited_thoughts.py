"""Sets a thinking budget by two requests, for upstreams that can continue a message.

The first request ends after the budget, or where the thoughts end. The second one continues a
message with these thoughts and their closing tag, so that the model can only answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STOPS = 4
"""The most stop strings that are sent to an upstream, since OpenAI's API takes no more. All of the
client's are also enforced here."""

CONTINUED: Mapping[str, bool] = {"continue_final_message": True, "add_generation_prompt": False}


@dataclass(frozen=True)
class ThoughtTags:
    opening: str
    closing: str

    def begun(self, thoughts: str, content: str) -> str:
        """The text of the message up to its answer: the thoughts, which may be in `content`, and
        their closing tag."""
        if thoughts:
            return f"{self.opening}\n{thoughts.strip()}\n{self.closing}\n\n{content}"
        if self.is_open(content):
            return f"{content.rstrip()}\n{self.closing}\n\n"
        return content or f"{self.opening}\n\n{self.closing}\n\n"

    def is_open(self, content: str) -> bool:
        return content.lstrip().startswith(self.opening) and self.closing not in content


@dataclass(frozen=True)
class LimitedThoughts:
    """The bodies of the two requests for one answer."""

    body: Mapping[str, Any]
    """The body of the request without a limit of its thoughts."""
    tags: ThoughtTags
    budget: int
    limit: str
    """The upstream's name for `max_tokens`."""

    def first(self) -> Mapping[str, Any]:
        """The body of the first request. If the budget is 0, it is that of the second one."""
        if not self.budget:
            return self.second("", "", 0)
        most = min(self.budget, self.body.get(self.limit, self.budget))
        stops = [*self.body.get("stop", ())[: STOPS - 1], self.tags.closing]
        return {**self.body, self.limit: most, "stop": stops}

    def second(self, thoughts: str, content: str, spent: int) -> Mapping[str, Any]:
        """The body of the second request. spent: the tokens that the first one used."""
        begun = {"role": "assistant", "content": self.tags.begun(thoughts, content)}
        found = {**self.body, "messages": [*self.body["messages"], begun], **CONTINUED}
        if self.limit in found:
            found[self.limit] = max(1, found[self.limit] - spent)
        return found
