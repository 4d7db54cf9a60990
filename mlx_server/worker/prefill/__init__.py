"""Prefill: the order of prompts, the budget of each step, and the prompt cache."""
