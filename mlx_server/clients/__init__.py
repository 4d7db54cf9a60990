"""Programs that talk to a running server over HTTP: the chat and the load generator."""
