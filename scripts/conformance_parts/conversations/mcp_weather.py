"""Serves the weather tool as an MCP server over stdio. This project's Python runs it as a
program."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")
DEGREES = {"Zürich": 18, "Bern": 16, "Chur": 21}


@server.tool(structured_output=False)
def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"{DEGREES[city]} degrees"


if __name__ == "__main__":
    server.run()
