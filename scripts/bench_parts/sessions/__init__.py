"""How many tokens of agents' sessions are computed more than once: a count, the same anywhere."""
