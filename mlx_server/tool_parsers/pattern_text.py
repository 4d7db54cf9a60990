"""The `pattern` of a schema as a regular expression of a grammar, which matches whole texts."""

import re
from dataclasses import dataclass, field

PART = re.compile(
    r"(?P<kind>\\[dwsDWS])|(?P<escape>\\(?:[\\/^$.*+?()\[\]{}|\-nrtfv\"'#&~ ,:;!=<>@%`_]"
    r"|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}))|(?P<group>\((?:\?:)?(?!\?))|(?P<times>(?:[*+?]"
    r"|\{\d+(?:,\d*)?\})\??(?![*+?]))|(?P<plain>[^\\(){}*+?\[])|(?P<end>\))|(?P<set>\[\^?)",
    re.DOTALL,
)
KINDS = {"d": "0-9", "w": "A-Za-z0-9_", "s": r"\s"}
OTHERS = {"D": "[^0-9]", "W": "[^A-Za-z0-9_]", "S": r"[^\s\x1c-\x1f]"}

ANY = "(?s:.*)"
ESCAPED = {"/": r"\/", "\n": r"\n", "\\_": "_", "\\/": r"\/"}


def search_pattern(pattern: str) -> str | None:
    """Matches the texts in which the pattern is found; None for what a grammar can't say, or
    says otherwise than JavaScript and Python do."""
    if not pattern:
        return ANY
    try:
        re.compile(pattern)
        return _PatternReader(pattern).alternatives()
    except (re.error, ValueError, KeyError, OverflowError, RecursionError):
        return None


@dataclass
class _PatternReader:
    pattern: str
    at: int = 0
    depth: int = 0
    done: list[str] = field(default_factory=list)

    def alternatives(self) -> str:
        while self.at < len(self.pattern):
            self.done.append(self._alternative())
        if self.depth or not self.done or self.pattern.endswith("|"):
            raise ValueError
        return f"(?:{'|'.join(self.done)})"

    def _alternative(self) -> str:
        before = "" if self._next("^") else ANY
        found: list[str] = []
        while self.at < len(self.pattern):
            if not self.depth and self._next("|"):
                break
            if self.pattern[self.at :][:2] in ("$", "$|") and not self.depth:
                self.at += 2
                return before + "".join(found)
            found.append(self._part())
        return before + "".join(found) + ANY

    def _next(self, sign: str) -> bool:
        found = self.pattern.startswith(sign, self.at)
        self.at += found
        return found

    def _part(self) -> str:
        match = PART.match(self.pattern, self.at)
        if not match or match["plain"] in ("^", "$"):
            raise ValueError(self.pattern)
        self.at = match.end()
        text = match[0]
        self.depth += bool(match["group"]) - bool(match["end"])
        if self.depth < 0:
            raise ValueError(self.pattern)
        match match.lastgroup:
            case "kind":
                return OTHERS.get(text[1]) or f"[{KINDS[text[1]]}]"
            case "times":
                return text if text == "?" else text.removesuffix("?")
            case "group":
                return "(?:"
            case "set":
                return text + self._set()
        return ESCAPED.get(text, text)

    def _set(self) -> str:
        found: list[str] = []
        while not self._next("]"):
            match = PART.match(self.pattern, self.at)
            if match and match["kind"]:
                found.append(KINDS[match[0][1]])  # the others are KeyError
                self.at = match.end()
            elif match and match["escape"]:
                found.append(ESCAPED.get(match[0], match[0]))
                self.at = match.end()
            elif self.at < len(self.pattern) and self.pattern[self.at] != "\\":
                sign = self.pattern[self.at]
                found.append("\\" + sign if sign in "[&~" else ESCAPED.get(sign, sign))
                self.at += 1
            else:
                raise ValueError(self.pattern)
        if not found or "--" in self.pattern:
            raise ValueError(self.pattern)
        return "".join(found) + "]"
