"""The one way from a request to the events of its answers."""
