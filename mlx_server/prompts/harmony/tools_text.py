"""Writes the tools of a gpt-oss prompt as openai-harmony does, which lets no other thread run
meanwhile: many tools are given to it one at a time."""

from collections.abc import Iterator
from typing import Any

from openai_harmony import Author, Conversation, DeveloperContent, Message, Role, ToolDescription

from mlx_server.prompts.harmony.vocabulary import encoding
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
