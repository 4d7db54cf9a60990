"""The tools of MCP servers that a conversation may use, by the names that the model sees."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlx_server.errors import BadRequest, CompilerTooSlow, InvalidGrammar
from mlx_server.events import Event, ToolsListed
from mlx_server.generation.tool_turn import ServerTool, ToolNames
from mlx_server.grammars.schema import check
from mlx_server.mcp import Toolset
from mlx_server.messages import Message, Tool
from mlx_server.requests import McpChoice, NamedTool, ToolChoice
from mlx_server.schemas.members import object_of


class ServerTools:
    def __init__(self, toolset: Toolset, functions: Sequence[Tool]) -> None:
        """functions: the conversation's own tools, whose names no other tool may get."""
        self._toolset = toolset
        self._names = ToolNames(functions)
        self._left_out: dict[str, list[str]] = {}
        """Error messages for the tools that are left out, by the server's label."""
        self.by_name = self._usable()

    def known_name(self, server: str, name: str) -> str:
        return self._names.known(server, name)

    def listed(self) -> Iterator[Event]:
        for server in self._toolset.servers:
            left_out = self._left_out.get(server.requested.label, [])
            errors = [*([server.listing.error] if server.listing.error else []), *left_out]
            if server.requested.listed and not errors:
                continue
            offered = {each.name for each in self.by_name.values()}
            tools = (tool for name, tool in server.listing.tools.items() if name in offered)
            yield ToolsListed(0, server.requested.label, tuple(tools), " ".join(errors) or None)

    def choice(self, choice: McpChoice) -> ToolChoice:
        """A choice among one server's tools, in the names that the model sees. Raises BadRequest
        for a tool that the server does not offer."""
        if choice.name is None and any(o.server == choice.server for o in self.by_name.values()):
            return "required"
        for shown, offered in self.by_name.items():
            if (offered.server, offered.name) == (choice.server, choice.name):
                return NamedTool(shown)
        raise BadRequest(
            f"`tool_choice` requires {choice.name or 'a tool'!r:.64} of the MCP server "
            f"{choice.server!r:.64}, which does not offer it.",
            param="tool_choice",
        )

    def _usable(self) -> dict[str, ServerTool]:
        found: dict[str, ServerTool] = {}
        for server in self._toolset.servers:
            label = server.requested.label
            for name, listed in server.listing.tools.items():
                try:
                    check(object_of(listed.schema), strict=False)
                except (InvalidGrammar, CompilerTooSlow) as error:
                    sentence = f"{name!r} is left out: {error.message}"
                    self._left_out.setdefault(label, []).append(sentence)
                    continue
                shown = self._names.of(label, name, self._is_unique(label, name))
                tool = Tool(shown, listed.description, listed.schema)
                found[shown] = ServerTool(label, name, tool, server.needs_approval(name))
        return found

    def _is_unique(self, label: str, name: str) -> bool:
        return not any(
            server.requested.label != label and name in server.listing.tools
            for server in self._toolset.servers
        )

    def renamed(self, message: Message) -> Message:
        """The message with the current names of the tools in its earlier calls."""
        if not any(call.server for call in message.tool_calls):
            return message
        calls = (
            replace(call, name=self.known_name(call.server, call.name), server=None)
            if call.server
            else call
            for call in message.tool_calls
        )
        return replace(message, tool_calls=tuple(calls))
