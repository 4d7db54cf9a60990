"""Restricts a row's next token by its grammar and its thinking budget."""
