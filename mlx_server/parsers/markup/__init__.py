"""Parses answers whose parts stand between delimiters, such as `<think>` and `</think>`."""
