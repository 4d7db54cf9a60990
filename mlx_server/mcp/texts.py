"""Texts of servers, as long as they may be."""


def cut(text: str, longest: int) -> str:
    """longest: bytes."""
    data = text.encode("utf-8", "replace")
    if len(data) <= longest:
        return text
    return data[:longest].decode("utf-8", "ignore") + f"\n[cut here; it has {len(data)} bytes]"
