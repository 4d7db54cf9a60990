"""Models on other servers: writes the requests to their servers and parses the answers."""
