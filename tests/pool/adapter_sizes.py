"""Sizes of adapters, the same for all."""

FILE, LOADED = 90, 100
"""Bytes of every adapter: by its file, and once it is there."""
