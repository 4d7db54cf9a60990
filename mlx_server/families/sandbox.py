"""Where chat templates run: programs by strangers, with bounds on time and memory.

Each block that a template runs is counted, and all that it writes; what makes much of little (`*`,
`replace`, the width of a format ...) is refused before it is made. Nothing is computed when a
template is compiled.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import Concat, Node, Output, TemplateData
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_server.errors import BadRequest

SECONDS = 10.0
CHARACTERS = 64 << 20
LARGEST = 1 << 20
"""That anything is repeated, or as wide as anything is made."""
BITS = 4096
"""Of a whole number."""

WORK = "the work so far"
"""In the variables of a rendering; no name that a template can spell."""

WIDE = re.compile(r"%(\(\w*\))?[^a-zA-Z%]*\d{4}|\{[^{}]*\d{4}|\{[^{}]*[:!][^{}]*\{")
"""A format with a large width, or one that is not seen."""

NO_FILTERS = frozenset({"pprint", "urlize", "wordwrap", "xmlattr"})
NO_METHODS = frozenset({"expandtabs", "translate"})
NO_GLOBALS = frozenset({"lipsum"})
"""They make much of little, and no chat template has a use for them."""

Values = Sequence[Any]


class TooMuch(BadRequest):
    """The same in other words would take as long again."""

    def __init__(self) -> None:
        super().__init__("The chat template makes too long a prompt of these messages, or no end.")


class Work:
    """Of one rendering."""

    def __init__(self) -> None:
        self._characters = CHARACTERS
        self._deadline = time.monotonic() + SECONDS

    def add(self, characters: int) -> None:
        self._characters -= characters
        if self._characters < 0 or time.monotonic() > self._deadline:
            raise TooMuch


class _Counting(CodeGenerator):
    """Every block, such as a loop's or a macro's, begins by counting itself."""

    def blockvisit(self, nodes: Iterable[Node], frame: Frame) -> None:
        nodes = list(nodes)
        said = (text for node in nodes if isinstance(node, Output) for text in node.nodes)
        size = sum(len(text.data) for text in said if isinstance(text, TemplateData))
        self.writeline(f"context.parent[{WORK!r}].add({size})")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


@pass_context
def _written(context: Context, value: Any) -> Any:
    context.parent[WORK].add(_size(value))
    return value


class Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Counting
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=_written)
        self.binop_table |= {"+": _sum, "*": _product, "**": _power, "%": _rest}
        self.filters |= filters
        self.filters |= {name: _bounded(name, self.filters[name]) for name in FILTERS}
        for name in NO_FILTERS:
            del self.filters[name]
        for name in NO_GLOBALS:
            del self.globals[name]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in NO_METHODS and super().is_safe_attribute(obj, attr, value)

    # named so that no keyword argument of a template's is one of these
    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        name = getattr(__obj, "__name__", "")
        if name in METHODS:
            text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
            _, *args = _checked(name, (text, *args), named)  # type: ignore[assignment]
        return super().call(__context, __obj, *args, **named)

    def joined(self, parts: Values) -> str:
        _limit(sum(map(_size, parts)))
        return "".join(map(str, parts))


def _size(value: Any) -> int:
    """Of its text, about; lists of lists can be far larger than they look."""
    if isinstance(value, str):
        return len(value)
    size, left = 0, [(value, 8)]
    while left and size <= CHARACTERS:
        found, indent = left.pop()
        size += indent
        match found:
            case str():
                size += len(found)
            case dict():
                left += [(each, indent + 1) for pair in found.items() for each in pair]
            case list() | tuple():
                left += [(each, indent + 1) for each in found]
    return size


def _bounded(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def bounded(*args: Any, **named: Any) -> Any:
        return own(*_checked(name, args, named), **named)

    return bounded


def _checked(name: str, args: Values, named: Mapping[str, Any]) -> Values:
    """The arguments of a filter or a method, which looking at them can use up."""
    if name == "join":
        args = [list(arg) if hasattr(arg, "__next__") else arg for arg in args]
    values = [v for v in (*args, *named.values()) if isinstance(v, VALUES)]
    if any(isinstance(n, int) and abs(n) > LARGEST for n in values):
        raise TooMuch
    _limit(MAKES[name](values))
    return args


def _limit(size: int, most: int | None = None) -> None:
    if size > (CHARACTERS if most is None else most):
        raise TooMuch


VALUES = (str, int, list, tuple, dict)


def _replaced(values: Values) -> int:
    text, old, new, *_ = map(str, values)
    return _size(values) + text.count(old) * len(new)


def _joined(values: Values) -> int:
    """Either can be what stands between; a text is joined by its characters."""
    sizes = [len(v) for v in values if not isinstance(v, int)]
    between = [len(v) for v in values if isinstance(v, str)]
    counts = [len(v) for v in values if isinstance(v, list | tuple | dict)] or sizes
    return _size(values) + max(counts, default=0) * (max(between, default=0) if sizes[1:] else 0)


def _widened(values: Values) -> int:
    """By so much per line, or per value."""
    widths = (abs(v) if isinstance(v, int) else sum(map(len, v)) for v in values[1:])
    return _size(values[:1]) * (1 + max(widths, default=0))


def _indented(values: Values) -> int:
    return _widened(["\n" * (1 + str(values[0]).count("\n")), *values[1:]]) + _size(values)


def _formatted(values: Values) -> int:
    form = str(values[0])
    if WIDE.search(form):
        raise TooMuch
    each = sum(abs(v) if isinstance(v, int) else _size(v) for v in values[1:])
    return len(form) + (form.count("%") + form.count("{")) * (1000 + each)


def _texts(values: Values) -> int:
    return sum(map(_size, values))


FILTERS: Mapping[str, Callable[[Values], int]] = {
    **dict.fromkeys(("string", "escape", "e", "forceescape", "safe", "urlencode"), _texts),
    **dict.fromkeys(("lower", "upper", "capitalize", "title", "trim", "striptags"), _texts),
    **dict.fromkeys(("center", "round", "truncate", "wordcount"), _texts),
    **dict.fromkeys(("batch", "slice", "tojson"), _widened),
    "format": _formatted,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
}
METHODS: Mapping[str, Callable[[Values], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _texts),
    **dict.fromkeys(("format", "format_map"), _formatted),
    "join": _joined,
    "replace": _replaced,
}
MAKES = {**FILTERS, **METHODS}
"""How much comes of such values, at most; of other filters and methods, no more than of them."""


def _sum(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _limit(len(left) + len(right))
    elif isinstance(left, list | tuple):
        _limit(len(left) + len(right), LARGEST)
    return left + right


def _product(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _limit(left.bit_length() + right.bit_length(), BITS)
    for value, times in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(times, int):
            _limit(_size(value) * times, LARGEST)
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _limit(left.bit_length() * abs(right), BITS)
    return left**right


def _rest(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _limit(_formatted([left, *(right if isinstance(right, tuple) else [right])]))
    return left % right
