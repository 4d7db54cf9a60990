"""The tokens that a row may generate next, by its grammar and its thinking budget."""
