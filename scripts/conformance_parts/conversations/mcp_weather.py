"""The tool as an MCP server, over stdio. Run by the Python of this project, as a program."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")
DEGREES = {"Zürich": 18, "Bern": 16, "Chur": 21}


@server.tool(structured_output=False)
def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"{DEGREES[city]} degrees"


if __name__ == "__main__":
    server.run()
