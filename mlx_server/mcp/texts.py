"""Truncates texts that servers send."""


def cut(text: str, longest: int) -> str:
    """Truncates the text to `longest` bytes of UTF-8 and appends a note with its full size."""
    data = text.encode("utf-8", "replace")
    if len(data) <= longest:
        return text
    return data[:longest].decode("utf-8", "ignore") + f"\n[cut here; it has {len(data)} bytes]"
