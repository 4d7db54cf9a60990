"""Rendering of conversations to prompts, shared by the families."""
