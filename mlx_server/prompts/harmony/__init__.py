"""Renders prompts in the Harmony format of gpt-oss."""
