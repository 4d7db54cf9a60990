"""Turns a request into the events of its answers, which every endpoint folds into its response."""
