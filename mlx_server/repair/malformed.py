class Malformed(Exception):
    """The text looked like markup but is not, or is broken beyond repair; it stays text."""
