"""Warm child processes for work that untrusted input could make endless."""
