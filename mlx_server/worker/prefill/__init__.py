"""Prompts before their first token: their order, the budget of a step, and the cache."""
