"""Turns a request into the events of its answers, for every endpoint."""
