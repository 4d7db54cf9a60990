"""Regular expressions that clients write, checked before llguidance compiles them.

llguidance would give nearly the same verdicts, but only by compiling: a millisecond or more for
each pattern, which nothing can interrupt, and the server process needs the verdict too.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

from mlx_server import limits

PIECE = re.compile(
    r"(?P<class>\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\])|(?P<escape>\\.)"
    r"|(?P<open>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:|<?[=!]|[a-zA-Z-]+(?=\))|>|\#)?)?)|(?P<close>\))"
    r"|(?P<times>\{(?P<least>\d+)(?P<comma>,(?P<most>\d*))?\})|(?P<many>[*+?])"
    r"|(?P<other>\[(?:\\.|[^\]\\])*\\?\Z|.)",
    re.DOTALL,
)
_HEX = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[xu]\{[0-9a-fA-F]+\}"
_ITEM = rf"{_HEX}|\\[pP](?:\{{[^}}]{{0,64}}\}}|.)|\\.|\[:\^?\w+:\]|."
_RANGE = re.compile(rf"({_ITEM})(?:-({_ITEM}))?", re.DOTALL)
"""A range in a character class, or a single item of one."""
_SHORT = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
    r"\S": r"[^\s\ufeff]",
}
"""Character classes with the meaning that ECMAScript gives them."""
_SHORTENED = re.compile(r"\\.|" + "|".join(map(re.escape, _SHORT.values())), re.DOTALL)
_LONG = {long: short for short, long in _SHORT.items()}
_BEGIN, _END = ("^", r"\A"), ("$", r"\z", r"\Z")
ANYTHING = "(?s:.*)"
_LOOKING = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind"}
_ESCAPE = re.compile(r"\\([^\W_]|[^\x00-\x7f])")
"""An escape that may mean more than the character itself; `_KNOWN` has those that can be used."""
_KNOWN_IN_CLASS = frozenset(map("\\{}".format, "dDsSwWaftnrv"))
_KNOWN = _KNOWN_IN_CLASS.union(map("\\{}".format, "pPxuUAz"))


@lru_cache(256)
def unsupported(pattern: str) -> str | None:
    """Returns why a grammar can't express the pattern, or why it is malformed; None if it can be
    used."""
    before, depth = "|", 0
    for piece in PIECE.finditer(pattern):
        if why := _unsupported_piece(piece) or _misplaced(piece, before):
            return why
        before = piece["open"] or piece[0]
        depth += bool(piece["open"]) - bool(piece["close"])
        if depth < 0:
            return "a ) that closes no group"
    return "a group that is never closed" if depth else None


def _unsupported_piece(piece: re.Match[str]) -> str | None:
    opened, escape = piece["open"] or "", piece["escape"] or ""
    if looking := _LOOKING.get(opened):
        return f"{looking} {opened}...)"
    if opened in ("(?", "(?>", "(?#"):
        return f"a group of an unknown kind ({piece.string[piece.start() :][:4]}...)"
    if re.fullmatch(r"\\[1-9k]", escape):
        return f"a back-reference ({escape})"
    if escape in ("\\b", "\\B", "\\<", "\\>"):
        return f"a word boundary ({escape})"
    if _ESCAPE.fullmatch(escape) and escape not in _KNOWN:
        return f"an unknown escape ({escape})"
    return _unsupported_class(piece["class"]) if piece["class"] else None


def _unsupported_class(written: str) -> str | None:
    if written in ("[]", "[^]"):
        return f"a class of nothing ({written})"
    for match in _RANGE.finditer(written[1:-1].removeprefix("^")):
        first, last = match[1], match[2] or ""
        for item in (first, last):
            if _ESCAPE.fullmatch(item) and item not in _KNOWN_IN_CLASS:
                return f"an escape that is unknown in a class ({item})"
        if last in _SHORT or last == r"\s":
            return f"a range that ends in no character ({match[0]})"
        if last and _code(first) > _code(last) >= 0:
            return f"a range that ends before it begins ({match[0]})"
    return None


def _code(item: str) -> int:
    """Returns the code point of an item of a class; -1 if the item is not a single character."""
    if re.fullmatch(_HEX, item):
        return int(item[2:].strip("{}"), 16)
    is_class = _ESCAPE.match(item) or item.startswith("[:")
    return -1 if is_class else ord(item[-1])


def _misplaced(piece: re.Match[str], before: str) -> str | None:
    if piece["other"] == "\\":
        return "a \\ at its end"
    if (piece["other"] or "").startswith("["):
        return "a [ that is never closed"
    if (piece["many"] or piece["times"]) and (before == "|" or before.startswith("(")):
        return f"a {piece[0]} that repeats nothing"
    if piece["other"] == "{" and before not in (r"\p", r"\P", r"\x", r"\u", r"\U"):
        return "a { that says no number of times (\\{ is the character)"
    if piece["most"] and float(piece["most"]) < float(piece["least"]):
        return f"a repetition whose most is below its least ({piece[0]})"
    return None


def excessive_part(pattern: str) -> str | None:
    """Returns a verb phrase that says which limit the pattern exceeds; None if it exceeds none."""
    if len(pattern) > limits.PATTERN_CHARACTERS:
        return f"has {len(pattern)} characters, more than {limits.PATTERN_CHARACTERS}"
    pieces = written_out(pattern)
    return pieces if isinstance(pieces, str) else None


@lru_cache(256)
def written_out(pattern: str) -> int | str:
    """Returns the number of the pattern's characters with its repetitions written out, or a verb
    phrase that says which limit it exceeds."""
    sizes, last = [0], 0
    for piece in PIECE.finditer(pattern):
        if piece["open"]:
            sizes.append(0)
            if len(sizes) > limits.PATTERN_DEPTH + 1:
                return f"is nested deeper than {limits.PATTERN_DEPTH} groups"
        elif piece["close"]:
            last = sizes.pop() if len(sizes) > 1 else 0
            sizes[-1] += last
        elif piece["times"]:
            times = _times(piece)
            if times > limits.PATTERN_REPEATS:
                return f"repeats {times} times, more than {limits.PATTERN_REPEATS}"
            sizes[-1] += last * (times - 1)
            last *= times
        elif not piece["many"]:
            last = 1
            sizes[-1] += 1
        if sizes[-1] > limits.PATTERN_STATES:
            return (
                f"is more than {limits.PATTERN_STATES} characters with its repetitions written out"
            )
    return sum(sizes)


def _times(piece: re.Match[str]) -> int:
    counts = [piece["least"], piece["most"] or "1"]
    return (
        limits.PATTERN_REPEATS + 1 if any(len(n) > 9 for n in counts) else max(1, *map(int, counts))
    )


def search_pattern(pattern: str) -> str | None:
    """Returns a regular expression, to stand between slashes, of the texts in which the pattern is
    found; None if a grammar can't express it."""
    if unsupported(pattern):
        return None
    patterns = []
    for option in _alternatives(pattern):
        whole = [*PIECE.finditer(option)]
        pieces = [*PIECE.finditer(_without_anchors(option))]
        if any(piece[0] in (*_BEGIN, *_END) for piece in pieces):
            return None
        before = "" if whole and whole[0][0] in _BEGIN else ANYTHING
        after = "" if whole and whole[-1][0] in _END else ANYTHING
        patterns.append(before + "".join(_escaped(_as_rust(piece)) for piece in pieces) + after)
    return f"(?:{'|'.join(patterns)})"


def unanchored(pattern: str) -> str:
    """Removes ^ and $ around each alternative of a pattern that has to match the whole text."""
    return "|".join(_without_anchors(option) for option in _alternatives(pattern))


def _alternatives(pattern: str) -> Iterator[str]:
    depth = begun = 0
    for piece in PIECE.finditer(pattern):
        depth += bool(piece["open"]) - bool(piece["close"])
        if piece["other"] == "|" and depth == 0:
            yield pattern[begun : piece.start()]
            begun = piece.end()
    yield pattern[begun:]


def _without_anchors(option: str) -> str:
    pieces = [piece[0] for piece in PIECE.finditer(option)]
    while pieces and pieces[0] in _BEGIN:
        pieces.pop(0)
    while pieces and pieces[-1] in _END:
        pieces.pop()
    return "".join(pieces)


def as_rust(pattern: str) -> str:
    """Rewrites a pattern so that llguidance gives it ECMAScript's meaning: \\d matches ASCII digits
    only, and a class has neither nested classes nor operators."""
    return "".join(_as_rust(piece) for piece in PIECE.finditer(pattern))


def _as_rust(piece: re.Match[str]) -> str:
    if piece["class"]:
        negated = "^" if piece[0].startswith("[^") else ""
        return f"[{negated}{_RANGE.sub(_range, piece[0][1 + len(negated) : -1])}]"
    return _SHORT.get(piece[0], piece[0])


def _range(match: re.Match[str]) -> str:
    return "-".join(_item(item) for item in match.groups() if item)


def _item(item: str) -> str:
    return "\\" + item if item in ("[", "&", "~", "-") else _SHORT.get(item, item)


def without_nested_classes(rust: str) -> str:
    """Returns what `as_rust` wrote, with no class inside another one."""
    return _SHORTENED.sub(lambda match: _LONG.get(match[0], match[0]), rust)


def terminal_of(pattern: str) -> str:
    """Returns the pattern as Lark writes it: between slashes, on one line."""
    if not pattern:
        return '""'
    return f"/{''.join(_escaped(_as_rust(piece)) for piece in PIECE.finditer(pattern))}/"


def _escaped(piece: str) -> str:
    if piece.startswith("\\"):
        return "\\n" if piece == "\\\n" else piece
    inner = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", piece, flags=re.DOTALL)
    return inner.replace("\n", "\\n")
