"""Answers as a test writes them: `think("Hm.") + call("get_weather", city="Paris")`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ScriptedAnswer:
    """One answer of a model: in words, as its raw output, or as token ids."""

    reasoning: str | None = None
    text: str | None = None
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Names of tools, with their arguments."""
    raw: str | None = None
    token_ids: tuple[int, ...] | None = None

    def __add__(self, other: "ScriptedAnswer") -> "ScriptedAnswer":
        """Joins the parts of two answers: a model thinks, then says, then calls."""
        if not isinstance(other, ScriptedAnswer):
            return NotImplemented
        for name in ("reasoning", "text"):
            if None not in (getattr(self, name), getattr(other, name)):
                raise ValueError(f"An answer can't have a {name} twice: join the two texts.")
        if any(each.raw is not None or each.token_ids is not None for each in (self, other)):
            raise ValueError("An answer in raw() or tokens() is whole: nothing can be added to it.")
        return replace(
            self,
            reasoning=other.reasoning if self.reasoning is None else self.reasoning,
            text=other.text if self.text is None else self.text,
            calls=(*self.calls, *other.calls),
        )

    def wire(self) -> dict[str, Any]:
        calls = [{"name": name, "arguments": arguments} for name, arguments in self.calls]
        found = {**vars(self), "calls": calls}
        return {name: value for name, value in found.items() if value is not None}


def say(text: str) -> ScriptedAnswer:
    """The answer's text."""
    return ScriptedAnswer(text=text)


def think(text: str) -> ScriptedAnswer:
    """Reasoning; add what follows it: `think("Hm.") + say("Yes.")`."""
    return ScriptedAnswer(reasoning=text)


def call(name: str, /, **arguments: Any) -> ScriptedAnswer:
    """A call of a tool; add another: `call("f", a=1) + call("g")`."""
    return ScriptedAnswer(calls=((name, arguments),))


def raw(output: str) -> ScriptedAnswer:
    """An answer by the model's raw output, special tokens included, however wrong it is."""
    return ScriptedAnswer(raw=output)


def tokens(ids: Sequence[int]) -> ScriptedAnswer:
    """The same in token ids of the family's vocabulary."""
    return ScriptedAnswer(token_ids=tuple(ids))
