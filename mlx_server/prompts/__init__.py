"""Conversations as prompts: what the families render with."""
