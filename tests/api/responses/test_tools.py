"""Tools of a request, those of servers, and the choice among them."""

from typing import Any

import pytest

from mlx_server.messages import Conversation
from mlx_server.requests import (
    ALL_TOOLS,
    NO_TOOLS,
    GenerateRequest,
    McpChoice,
    McpTools,
    NamedTool,
    ToolFilter,
)
from tests.api.responses.bodies import Json, asked, refused

FUNCTION: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}


SERVER: Json = {"type": "mcp", "server_label": "docs", "server_url": "https://example.com/mcp"}


def test_tools() -> None:
    request, mcp = asked(tools=[FUNCTION, {"type": "web_search"}, SERVER])
    (prompt,) = request.prompts
    assert isinstance(prompt, Conversation)
    assert [tool.name for tool in prompt.tools] == ["f"]
    (server,) = mcp.servers
    assert (server.label, server.url, server.param) == (
        "docs",
        "https://example.com/mcp",
        "tools[2]",
    )
    assert (server.always_approve, server.never_approve) == (ALL_TOOLS, NO_TOOLS)


READ_ONLY = ToolFilter(read_only=True)


@pytest.mark.parametrize(
    ("given", "always", "never"),
    [
        (None, ALL_TOOLS, NO_TOOLS),
        ("always", ALL_TOOLS, NO_TOOLS),
        ("never", NO_TOOLS, ALL_TOOLS),
        ({"never": {"read_only": True}}, NO_TOOLS, READ_ONLY),
        ({"always": {"tool_names": ["a"]}, "never": None}, ToolFilter(frozenset("a")), NO_TOOLS),
    ],
)
def test_approval(given: Any, always: ToolFilter, never: ToolFilter) -> None:
    (server,) = asked(tools=[{**SERVER, "require_approval": given}])[1].servers
    assert (server.always_approve, server.never_approve) == (always, never)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (None, ALL_TOOLS),
        ([], NO_TOOLS),
        (["a", "b"], ToolFilter(frozenset("ab"))),
        ({"read_only": True, "tool_names": None}, READ_ONLY),
    ],
)
def test_allowed_tools_of_a_server(given: Any, allowed: ToolFilter) -> None:
    (server,) = asked(tools=[{**SERVER, "allowed_tools": given}])[1].servers
    assert server.allowed == allowed


def test_a_list_that_the_client_knows() -> None:
    listed = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "docs", "tools": []}
    for item, known in [(listed, True), ({**listed, "error": "Gone."}, False)]:
        (server,) = asked([item], tools=[SERVER])[1].servers
        assert server.listed is known


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, NamedTool("f")),
    ],
)
def test_choice(choice: Any, made: Any) -> None:
    assert asked(tools=[FUNCTION], tool_choice=choice)[0].tool_choice == made


def test_choice_of_a_servers_tool() -> None:
    for name in (None, "find"):
        choice = {"type": "mcp", "server_label": "docs", "name": name}
        assert asked(tools=[SERVER], tool_choice=choice)[1].choice == McpChoice("docs", name)
    assert asked(tools=[SERVER], tool_choice="required")[0].tool_choice == "required"


def test_choice_among_some() -> None:
    def among(*tools: Json) -> tuple[GenerateRequest, McpTools]:
        choice = {"type": "allowed_tools", "mode": "required", "tools": list(tools)}
        others = [{**FUNCTION, "name": "g"}, {**SERVER, "server_label": "mail"}]
        return asked(tools=[FUNCTION, SERVER, *others], tool_choice=choice)

    def names(request: GenerateRequest) -> list[str]:
        (prompt,) = request.prompts
        assert isinstance(prompt, Conversation)
        return [tool.name for tool in prompt.tools]

    request, mcp = among({"type": "function", "name": "f"})
    assert (request.tool_choice, names(request), mcp.servers) == ("required", ["f"], ())
    of_docs = {"type": "mcp", "server_label": "docs"}
    request, mcp = among({**of_docs, "name": "a"}, {**of_docs, "name": "b"}, {"type": "web_search"})
    (server,) = mcp.servers
    assert (names(request), server.label, server.allowed.names) == ([], "docs", frozenset("ab"))
    (server,) = among({**of_docs, "name": "a"}, of_docs)[1].servers
    assert server.allowed == ALL_TOOLS


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([], "required"),
        ([FUNCTION], {"type": "function", "name": "g"}),
        ([FUNCTION], {"type": "mcp", "server_label": "docs"}),
        ([SERVER], {"type": "mcp", "server_label": "mail"}),
        ([{"type": "web_search"}], {"type": "web_search"}),
        ([FUNCTION], {"type": "custom", "name": "f"}),
        (
            [FUNCTION],
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
        ),
        (
            [FUNCTION],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        ),
    ],
)
def test_choices_that_cannot_be_made(tools: list[Json], choice: Any) -> None:
    assert str(refused(tools=tools, tool_choice=choice).param).startswith("tool_choice")


@pytest.mark.parametrize(
    "tools",
    [
        [SERVER, SERVER],
        [{**SERVER, "server_url": None}],
        [{**SERVER, "connector_id": "mine"}],
    ],
)
def test_servers_that_cannot_be_meant(tools: list[Json]) -> None:
    assert str(refused(tools=tools).param).startswith("tools")
