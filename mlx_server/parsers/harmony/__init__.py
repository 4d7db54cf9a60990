"""Parses the Harmony format of gpt-oss."""
