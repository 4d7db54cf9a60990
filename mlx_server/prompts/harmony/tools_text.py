"""Writes the tools of a gpt-oss prompt as openai-harmony does, which lets no other thread run
meanwhile: many tools are given to it one at a time."""

import re
from collections.abc import Iterator, Mapping
from heapq import merge
from typing import Any

from openai_harmony import Author, Conversation, DeveloperContent, Message, Role, ToolDescription

from mlx_server import limits
from mlx_server.grammars.arguments import lists_properties
from mlx_server.grammars.view import View
from mlx_server.prompts.harmony.vocabulary import encoding, splitter
from mlx_server.request_threads import check_wanted

WHOLE = 1 << 16
"""Characters of tools that are given to the library at once."""

AROUND = 4
"""Characters that are written around each text or number of a schema."""

BEGIN = "# Tools\n\n## functions\n\nnamespace functions {\n\n"
END = "} // namespace functions"


SOME_TOOLS = DeveloperContent.new().with_function_tools([ToolDescription.new("f", "")])
"""Stands for other tools: the system message says that there are some."""


class LongTools(DeveloperContent):  # type: ignore[misc]  # the library has no types
    """Tools that are not given to the library at once."""

    def text(self) -> str:
        tools = (tool for space in (self.tools or {}).values() for tool in space.tools)
        return "".join([BEGIN, *map(_written, tools), END])


def _written(tool: ToolDescription) -> str:
    """Returns a tool's description as comments, and its type, which the library writes."""
    check_wanted()
    *lines, last = tool.description.replace("\r\n", "\n").split("\n")
    comments = "".join(f"// {line}\n" for line in (*lines, *filter(None, [last])))
    bare = DeveloperContent.new().with_function_tools([tool.model_copy(update={"description": ""})])
    message = Message(author=Author(role=Role.DEVELOPER), content=[bare])
    tokens = encoding().render_conversation(Conversation.from_messages([message]))
    written = encoding().decode(tokens).partition(BEGIN)[2]
    return comments + str(written).removesuffix(f"{END}<|end|>")


def parts(value: Any) -> Iterator[str]:
    """Yields each text and number of a schema, and an empty text for each list and object."""
    match value:
        case list():
            yield ""
            for item in value:
                yield from parts(item)
        case dict():
            yield from parts([*value.keys(), *value.values()])
        case _:
            yield str(value)


def for_typescript(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the reduced schema of a tool's parameters; None if it lists none."""
    if not lists_properties(schema):
        return None
    return SchemaReducer(schema).plain({**schema, "type": "object"})


_NOT_WRITTEN = ("$defs", "definitions", "anyOf", "oneOf", "allOf")


class SchemaReducer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._view = View(root)
        self._left = limits.HARMONY_REFERENCES

    def plain(self, schema: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
        """path: one entry per level, the reference that was followed there, or ""."""
        if not isinstance(schema, Mapping) or len(path) > limits.HARMONY_DEPTH:
            return {}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference in path or not self._left:
                return {}
            self._left -= 1
            own = {key: value for key, value in schema.items() if key != "$ref"}
            target = self._view.referred({"$ref": reference})
            inner = target.schema if target and isinstance(target.schema, Mapping) else {}
            return self.plain({**inner, **own}, (*path, reference))
        path = (*path, "")
        own = {key: value for key, value in schema.items() if key not in _NOT_WRITTEN}
        options = _options(schema)
        if len(options) == 1:
            return self.plain({**options[0], **own}, path)
        if options:
            return own | _either([self.plain(option, path) for option in options])
        return self._typed(own, path)

    def _typed(self, schema: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        if "const" in schema:
            schema["enum"] = [schema["const"]]
        if isinstance(schema.get("properties"), Mapping):
            schema.setdefault("type", "object")
            schema["properties"] = {k: self.plain(v, path) for k, v in schema["properties"].items()}
        if "items" in schema:
            schema["items"] = self.plain(schema["items"], path)
        if schema.get("type") == "null":
            schema["type"] = ["null"]
        if isinstance(schema.get("description"), str):
            schema["description"] = "\n// ".join(schema["description"].splitlines())
        if _are_words(schema.get("enum")):
            schema.setdefault("type", "string")
        return schema


def _either(options: list[dict[str, Any]]) -> dict[str, Any]:
    types = [option.get("type") for option in options if option.keys() <= {"type", "title"}]
    names = [name for type in types for name in (type if isinstance(type, list) else [type])]
    simple = len(types) == len(options) and all(isinstance(name, str) for name in names)
    return {"type": names} if simple else {"oneOf": options}


def _options(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the alternatives of a schema. Of `allOf` only the first is used: no type can combine
    them."""
    for key, most in (("anyOf", None), ("oneOf", None), ("allOf", 1)):
        options = schema.get(key)
        if isinstance(options, list) and options:
            return [option for option in options if isinstance(option, Mapping)][:most]
    return []


def _are_words(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


LONGEST_WORD = 256
"""Most characters without a token boundary. openai-harmony's time grows with their square."""

WINDOW = 1 << 14
"""Characters that are split into words at a time: each word takes hundreds of bytes."""

BEGIN_OF_WORD = re.compile(r"\S(?= [^\W_])|\n(?=[^\W_])")
"""Ends where a word surely begins, whatever is before it."""

LONG = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD}}}|(?<!\s)\s{{{LONGEST_WORD}}}")
"""Matches long runs only at their start, or each character would be tested hundreds of times."""


def text_pieces(text: str) -> Iterator[str]:
    """Yields the text in pieces of about WINDOW characters. They change no token, except within
    words that are longer than LONGEST_WORD."""
    begin = 0
    for place in merge(_within_long_words(text), _between_words(text)):
        if place > begin:
            yield text[begin:place]
            begin = place
    if text[begin:]:
        yield text[begin:]


def _within_long_words(text: str) -> Iterator[int]:
    for at, size in long_words(text):
        yield from range(at + LONGEST_WORD, at + size, LONGEST_WORD)


def _between_words(text: str) -> Iterator[int]:
    """Yields a place in each window where a word begins."""
    at = 0
    while len(text) - at > 2 * WINDOW:
        if match := BEGIN_OF_WORD.search(text, at + WINDOW, at + 2 * WINDOW):
            yield (at := match.end())
            continue
        words = splitter().pre_tokenize_str(text[at : at + WINDOW])
        # the last ones may go on after this part
        start: int = words[-3][1][0] if len(words) > 2 else 0
        if start:
            yield (at := at + start)
        else:
            at += WINDOW


def long_words(text: str) -> Iterator[tuple[int, int]]:
    """Yields start and length of each pre-tokenised word that is longer than LONGEST_WORD."""
    at = 0
    while at < len(text):
        check_wanted()
        part = _window(text, at)
        if LONG.search(part):
            for word, (start, _) in splitter().pre_tokenize_str(part):
                if len(word) > LONGEST_WORD:
                    yield at + start, len(word)
        at += len(part)


def _window(text: str, at: int) -> str:
    """Returns the next window of text, up to its last space, where a token can end, if it has
    one."""
    end = at + WINDOW
    space = text.rfind(" ", at + 1, end) if end < len(text) else -1
    return text[at : end if space < 0 else space]
