"""Counts how many tokens of agents' sessions are computed more than once: the same on any
machine."""
