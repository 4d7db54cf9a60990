class Malformed(Exception):
    """The text looked like markup but is not, or is broken beyond repair; it stays text."""


class UnknownTool(Malformed):
    """A call of a tool that the request does not offer."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no tool {name!r}")
        self.name = name
