"""Text that a terminal shows as it is."""

from rich.text import Text


def printable(text: str) -> Text:
    """Rich text without markup or control characters."""
    return Text("".join(c if c.isprintable() else " " for c in text))
