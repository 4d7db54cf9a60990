"""Warm child processes for work that a client's or publisher's input can make endless."""
