"""Checks of the engine on a GPU that nobody has tried it on."""
