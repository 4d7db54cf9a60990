"""Tools whose input is free text (OpenAI's `custom` tools), as the functions that models can call.

Such a function has one argument, the text. Calls are converted back: the text is decoded from the
arguments while they arrive.
"""

import json
import re
from typing import Annotated, Literal

from pydantic import Field

from mlx_server import limits
from mlx_server.api.fields import WireModel
from mlx_server.grammars import patterns
from mlx_server.json_bounds import json_or_none
from mlx_server.messages import Tool

INPUT = "input"
"""The name of the argument that is the text."""


class FreeformText(WireModel):
    type: Literal["text"]


class TextGrammar(WireModel):
    definition: Annotated[str, Field(max_length=limits.GRAMMAR_CHARACTERS)]
    syntax: Literal["lark", "regex"]


SYNTAX = {"lark": "Lark grammar", "regex": "regular expression"}


def freeform_tool(name: str, description: str | None, grammar: TextGrammar | None) -> Tool:
    """The function for a tool that takes free text. A regular expression is held while the model
    writes the text, as the `pattern` of a JSON string; a grammar in Lark is described alone."""
    is_held = grammar is not None and grammar.syntax == "regex"
    about = "The text for the tool, as one string."
    if grammar:
        about += f" It must match this {SYNTAX[grammar.syntax]}:\n{grammar.definition}"
    text = {"type": "string", "description": about}
    if grammar and is_held:
        text["pattern"] = f"^(?:{patterns.unanchored(grammar.definition)})$"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    return Tool(
        name,
        description,
        {**schema, "additionalProperties": False},
        unenforced=("format",) if grammar and not is_held else (),
    )


def arguments_of_text(text: str) -> str:
    return json.dumps({INPUT: text}, ensure_ascii=False)


def text_of_arguments(arguments: str) -> str:
    """The text of a complete call."""
    decoded = FreeformInput()
    return decoded.feed(arguments) + decoded.finish()


_BEGIN = json.dumps({INPUT: ""})[:-2]
_HALF_PAIR = r"[dD][89abAB][0-9a-fA-F]{2}(?=(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z)"
"""The digits of a first surrogate whose second one may follow."""
_WHOLE_TEXT = re.compile(rf'(?>[^"\\]+|\\(?:["\\/bfnrt]|u(?!{_HALF_PAIR})[0-9a-fA-F]{{4}}))*+')
_SURROGATES = re.compile("[\ud800-\udfff]")


class FreeformInput:
    """Decodes the arguments of a call to the text in them, as far as it is certain."""

    def __init__(self) -> None:
        self.text = ""
        self._arguments: list[str] = []
        self._waiting = ""
        """Arguments that are not decoded yet."""
        self._is_inside: bool | None = None
        """Whether the arguments so far end within the text; None before it begins."""

    def feed(self, piece: str) -> str:
        """Returns what the piece adds to the text."""
        self._arguments.append(piece)
        self._waiting += piece
        if self._is_inside is None and len(self._waiting) >= len(_BEGIN):
            self._is_inside = self._waiting.startswith(_BEGIN)
            self._waiting = self._waiting.removeprefix(_BEGIN)
        return self._decode() if self._is_inside else ""

    def finish(self) -> str:
        """Returns the text of a complete call that `feed` could not read: its only argument by
        another name, or all of its arguments."""
        arguments = "".join(self._arguments)
        return "" if arguments.startswith(_BEGIN) else self._add(_only_text_in(arguments))

    def _decode(self) -> str:
        whole = _WHOLE_TEXT.match(self._waiting)
        assert whole, "it matches the empty text"
        end = whole.end()
        taken, self._waiting = self._waiting[:end], self._waiting[end:]
        if self._waiting.startswith('"'):
            self._is_inside = False
        return self._add(json.loads(f'"{taken}"', strict=False))

    def _add(self, text: str) -> str:
        whole = _SURROGATES.sub("\ufffd", text)
        self.text += whole
        return whole


def _only_text_in(arguments: str) -> str:
    parsed = json_or_none(arguments)
    values = list(parsed.values()) if isinstance(parsed, dict) else []
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments
