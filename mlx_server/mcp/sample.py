"""A small MCP server for the example in the documents: `python -m mlx_server.mcp.sample`."""

from mcp.server.mcpserver import MCPServer

NOTES = {"release": "The last release starts faster, and serves Ollama's API."}

server = MCPServer("release-notes")


@server.tool()
def search(query: str) -> str:
    """Search the release notes."""
    notes = [note for word, note in NOTES.items() if word in query.lower()]
    return "\n".join(notes) or "Nothing was found."


if __name__ == "__main__":
    server.run("stdio")
