"""Regular expressions run over text of clients, models, files and other servers: in linear time.

Each expression of the package and of the page is found in the source, so that a new one is tested
too. Its attacks are built from the expression itself: what leads into a repetition, many times what
it repeats, and a character after which it may not match.
"""

import ast
import re
import signal
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

import mlx_server

pytestmark = pytest.mark.slow

parser = import_module("re._parser")
compiler = import_module("re._compiler")

PACKAGE = Path(mlx_server.__file__).parent
ANCHORED = frozenset(("match", "fullmatch"))
SCANNING = frozenset(("search", "split", "findall", "finditer", "sub", "subn"))
FLAGS_FROM = {"compile": 1, "sub": 4, "subn": 4, "split": 3}
"""The place of the flags among a function's arguments, where it is not the third."""

BOUNDED = {
    "api.ollama.PART": "MOST_CHARACTERS",
    "api.ollama.NUMBER": "MOST_CHARACTERS",
    "models.files.KINDS": "BYTES",
}
"""Expressions that take more than linear time, and the constant next to them that bounds the
characters of their texts."""

LOCALS: Mapping[str, Mapping[str, Any]] = {
    "models.tokenizer_file.pattern_of": {
        "first": "<a",
        "trie": {"<": {"a": {"": {}, "b": {"": {}}}}, "a": {"<": {"": {}}}},
        "between": "(?:\x80|\x81)*",
    },
    "models.tokenizer_file._wordy": {"wordy": re.compile("(?=[ab])(?=(a(?:ab)?|ba))")},
    "families.by_template.found": {"quoted": [r"key\s*=\s*['\"]value['\"]"] * 2},
    "generation.output._invisible": {"either": rb"\s|<\|end\|>|<\|"},
    "grammars.lark._marks": {"longest_first": ["<a><a>", "<a>", "<"]},
    "prompts.control_token_guard._marks": {"either": r"\x80|\\u0080|&#128;"},
    "worker.constrained_decoding.json_texts.class_": {"piece": {"class": "[a-b]"}},
    "sources.given_answers._around": {"own": ["own", "ownown"]},
    "tool_parsers.keyed_calls.name": {"stops": "<("},
    "tool_parsers.source._stops_at_end": {"whole": r"<a>|<a", "part": "<a|<"},
    "tool_parsers.source._may_begin": {"begun": ["<a", "a<"], "at_end": [r"<\Z", r"a\Z"]},
    "tool_parsers.source._any_of": {"longest_first": ["<a><a>", "<a>", "<"]},
    "tool_parsers.values._marked": {"quote": '"'},
}
"""Values of the local variables of which an expression is made when the server runs."""

OWNERS = ("sources.transcript._check_pattern", "sources.transcript.pattern")
"""Expressions that the owner of the server writes."""


@dataclass
class Expression:
    pattern: str | bytes
    flags: int
    uses: set[str] = field(default_factory=set)
    """The methods by which it reads text."""


@cache
def expressions() -> dict[str, list[Expression]]:
    """All expressions, by their place: the module, and the variable or the function."""
    found: dict[str, list[Expression]] = defaultdict(list)
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    methods: dict[object, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for name, method in _methods(tree):
            methods[path, name].add(method)
            methods[name].add(method)
    for path, tree in trees.items():
        for call, name in _calls_of_re(tree):
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            place = f"{module.removesuffix('.__init__')}.{name}"
            if place in OWNERS:
                continue
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            uses = methods[path, name] or methods[name] if method == "compile" else {method}
            found[place] += (
                Expression(pattern.pattern, pattern.flags, uses or {"search"})
                for pattern in _compiled(place, module.removesuffix(".__init__"), call)
            )
    return found | _of_the_page()


def _methods(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields the names of objects and the methods of expressions that are used of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ANCHORED | SCANNING:
            of = node.value
            while isinstance(of, ast.Subscript):
                of = of.value
            if isinstance(of, ast.Name | ast.Attribute):
                yield of.id if isinstance(of, ast.Name) else of.attr, node.attr


def _calls_of_re(tree: ast.AST, name: str = "") -> Iterator[tuple[ast.Call, str]]:
    """Yields calls of the module `re`, and the innermost variable or function that each is in."""
    for node in ast.iter_child_nodes(tree):
        inner = name
        match node:
            case ast.FunctionDef(name=str(inner)) | ast.keyword(arg=str(inner)):
                pass
            case ast.Assign(targets=[ast.Name(id=inner) | ast.Attribute(attr=inner)]):
                pass
            case ast.NamedExpr(target=ast.Name(id=inner)):
                pass
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=method)) if (
                method in ANCHORED | SCANNING | {"compile"}
            ):
                yield node, name
        yield from _calls_of_re(node, inner)


def _compiled(place: str, module: str, call: ast.Call) -> Iterator[re.Pattern[Any]]:
    assert isinstance(call.func, ast.Attribute)
    own = vars(import_module(f"mlx_server.{module}"))
    names = {**own, **LOCALS.get(place, {})}
    flags = call.args[FLAGS_FROM.get(call.func.attr, 2) :]
    flags += [each.value for each in call.keywords if each.arg == "flags"]
    try:
        pattern, *given = (
            eval(compile(ast.Expression(part), place, "eval"), names)
            for part in (call.args[0], *flags)
        )
        yield re.compile(pattern, sum(given))
    except NameError as error:
        made = [*_patterns_in(own.get(place.rpartition(".")[2]))]
        if not made:
            raise AssertionError(
                f"{place} is made when the server runs: add it to LOCALS"
            ) from error
        yield from made


def _patterns_in(value: Any) -> Iterator[re.Pattern[Any]]:
    match value:
        case re.Pattern():
            yield value
        case dict() | tuple():
            for each in value.values() if isinstance(value, dict) else value:
                yield from _patterns_in(each)


def _of_the_page() -> dict[str, list[Expression]]:
    found: dict[str, list[Expression]] = {}
    expression = r"/(?![/*])(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\[\n])+/"
    literal = re.compile(rf"(?:const (\w+) = |[(=,!?:&|] ?)({expression})([a-z]*)")
    for path in sorted((PACKAGE / "api" / "page" / "static").glob("*.js")):
        for name, written, flags in literal.findall(path.read_text("utf-8")):
            pattern = re.sub(r"\\p\{\w+\}", r"\\w", written[1:-1])
            uses = {"match" if "y" in flags or pattern.startswith("^") else "search"}
            place = f"page.{path.stem}.{name or written}"
            found[place] = [Expression(pattern, re.I if "i" in flags else 0, uses)]
    return found


REPEATS = (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT)
CHARACTERS = (parser.LITERAL, parser.NOT_LITERAL, parser.IN, parser.ANY)
LEAST_REPEATS = 50
"""Repetitions that end earlier can't make the time grow with the text."""
ALPHABET = [*"a0A_", *map(chr, range(128)), "é", "漢", "\u2028"]


@dataclass
class Attacks:
    """Texts for which an expression may take long: (beginning, repeated text, end)."""

    expression: Expression

    @cached_property
    def compiled(self) -> re.Pattern[Any]:
        return re.compile(self.expression.pattern, self.expression.flags)

    @cached_property
    def tree(self) -> Any:
        return parser.parse(self.expression.pattern, self.expression.flags)

    @cached_property
    def alphabet(self) -> list[Any]:
        is_text = isinstance(self.expression.pattern, str)
        return ALPHABET if is_text else [c.encode() for c in ALPHABET if c.isascii()]

    @property
    def repeats_groups(self) -> bool:
        """Whether a repetition is not only of one character."""
        found = self._repetitions(self.tree, self.empty, self.empty)
        return any(len(body) > 1 or body[0][0] not in CHARACTERS for _, body in found)

    @cached_property
    def empty(self) -> Any:
        return self.alphabet[0][:0]

    @cached_property
    def representatives(self) -> list[Any]:
        """One character for each set of characters that no part of the expression tells apart."""
        nodes = {repr(node): node for node in self._nodes(self.tree) if node[0] in CHARACTERS}
        written = {character for node in nodes.values() for character in self._alone(node)}
        by_parts: dict[tuple[bool, ...], Any] = {}
        for character in sorted(self.alphabet, key=lambda character: character not in written):
            by_parts.setdefault(
                tuple(character in self._members(node) for node in nodes.values()), character
            )
        return list(by_parts.values())

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        seen = set()
        ends = [self.empty, *self.representatives[:8]]
        for beginning, body in self._repetitions(self.tree, self.empty, self.empty):
            for pump in filter(None, self._pumps(beginning, body)):
                for attack in ((b, pump, e) for b in {beginning, self.empty} for e in ends):
                    if attack not in seen:
                        seen.add(attack)
                        yield attack

    def _pumps(self, beginning: Any, body: Any) -> Iterator[Any]:
        """Yields what the repetition may match, alone and with what leads into it."""
        found = [self._sample(body, option, times) for option in range(6) for times in range(3)]
        if len(body) == 1 and body[0][0] in CHARACTERS:
            found = [c for c in self.representatives if c in self._members(body[0])][:12]
        yield from found
        yield from (beginning + pump * 8 for pump in found[:4])

    def _repetitions(self, sequence: Any, least: Any, most: Any) -> Iterator[tuple[Any, Any]]:
        """Yields what may lead into a repetition, and its body. least, most: what comes before,
        with repetitions as short as may be, and with one more."""
        for node in sequence:
            if node[0] in REPEATS and node[1][1] > LEAST_REPEATS:
                yield from ((beginning, node[1][2]) for beginning in {least, most})
            for inner in self._inner(node):
                yield from self._repetitions(inner, least, most)
            least, most = least + self._text(node, 0, 0), most + self._text(node, 0, 1)

    def _nodes(self, sequence: Any) -> Iterator[Any]:
        for node in sequence:
            yield node
            for inner in self._inner(node):
                yield from self._nodes(inner)

    def _inner(self, node: Any) -> list[Any]:
        """The sequences in a node of the parsed expression."""
        kind, value = node
        if kind in REPEATS:
            return [value[2]]
        match value:
            case [None, [*options]] if kind is parser.BRANCH:
                return options
            case [_, inner] if kind in (parser.ASSERT, parser.ASSERT_NOT):
                return [inner]
        if kind is parser.SUBPATTERN:
            return [value[3]]
        return [value] if kind is parser.ATOMIC_GROUP else []

    def _sample(self, sequence: Any, option: int, times: int) -> Any:
        return self.empty.join(self._text(node, option, times) for node in sequence)

    def _text(self, node: Any, option: int, times: int) -> Any:
        """A text that the node matches. option: which of several; times: of what may repeat."""
        kind, value = node
        if kind in CHARACTERS:
            members = self._members(node)
            found = [c for c in self.representatives if c in members]
            return found[option % len(found)] if found else self.empty
        if kind is parser.BRANCH:
            return self._sample(value[1][option % len(value[1])], option, times)
        if kind in REPEATS:
            return self._sample(value[2], option, times) * max(value[0], min(times, value[1]))
        inner = [] if kind in (parser.ASSERT, parser.ASSERT_NOT) else self._inner(node)
        return self._sample(inner[0], option, times) if inner else self.empty

    def _alone(self, node: Any) -> Collection[Any]:
        return self._members(node) if node[0] is parser.LITERAL else ()

    @cached_property
    def _sets(self) -> dict[str, Collection[Any]]:
        return {}

    def _members(self, node: Any) -> Collection[Any]:
        if repr(node) not in self._sets:
            alone = compiler.compile(
                parser.SubPattern(self.tree.state, [node]), self.compiled.flags
            )
            self._sets[repr(node)] = {c for c in self.alphabet if alone.fullmatch(c)}
        return self._sets[repr(node)]


class _TooLong(Exception):
    pass


def _interrupt(*_: object) -> None:
    raise _TooLong


MOST_SECONDS = 0.25
SHORT, LONG = 2_000, 16_000
SUSPICIOUS_SECONDS = 0.0005
"""A quadratic expression takes longer for a text of `SHORT` characters, most others do not."""
MOST_GROWTH = 24
"""Eight times the text should take eight times as long; it is 64 times for a quadratic one. Four
times that text take sixteen times as long then."""
BOUNDED_SECONDS = 0.005


def seconds(pattern: re.Pattern[Any], use: str, text: Any, tries: int = 1) -> float:
    """The least of the thread times that it takes; `MOST_SECONDS` if it is interrupted."""
    spent = [MOST_SECONDS]
    for _ in range(tries):
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        begun = thread_time()
        try:
            if use in ANCHORED:
                getattr(pattern, use)(text)
            else:
                deque(pattern.finditer(text), maxlen=0)
            spent.append(thread_time() - begun)
        except _TooLong:
            break
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return min(spent)


def _text_of(attack: tuple[Any, Any, Any], size: int) -> Any:
    beginning, pump, end = attack
    return beginning + pump * max(1, (size - len(beginning) - len(end)) // len(pump)) + end


def growing(expression: Expression, use: str) -> tuple[Any, Any, Any] | None:
    """The first attack whose time grows faster than its text."""
    attacks = Attacks(expression)
    suspicious = SUSPICIOUS_SECONDS
    for attack in attacks:
        short, long, longer = (_text_of(attack, size) for size in (SHORT, LONG, 4 * LONG))
        if (spent := seconds(attacks.compiled, use, short)) > suspicious:
            grows = partial(_grows, attacks.compiled, use)
            if grows(short, long, MOST_GROWTH) and grows(long, longer, MOST_GROWTH / 2):
                return attack
            suspicious = 1.2 * spent
    return None


def _grows(pattern: re.Pattern[Any], use: str, short: Any, long: Any, most: float) -> bool:
    for tries in range(1, 4):  # another process may have taken the caches meanwhile
        spent = seconds(pattern, use, short, tries)
        if seconds(pattern, use, long, tries) < min(MOST_SECONDS, most * spent):
            return False
    return True


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGVTALRM, _interrupt)
    yield
    signal.signal(signal.SIGVTALRM, before)


PACKAGES = sorted({*(path.stem for path in PACKAGE.iterdir()), "page"} - {"__pycache__"})
"""Of modules. The expressions are found in a test: pytest collects it in several processes."""


def of_package(name: str) -> Iterator[tuple[str, Expression]]:
    for place, found in expressions().items():
        if place.partition(".")[0] == name:
            yield from ((place, expression) for expression in found)


def test_each_is_in_one_of_the_packages() -> None:
    assert {place.partition(".")[0] for place in expressions()} <= {*PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_linear(package: str) -> None:
    for place, expression in of_package(package):
        for use in {use if use in ANCHORED else "finditer" for use in expression.uses}:
            if place not in BOUNDED:
                assert growing(expression, use) is None, place
                continue
            attacks = Attacks(expression)
            for text in (_text_of(attack, _bound(place)) for attack in attacks):
                assert seconds(attacks.compiled, use, text, tries=3) < BOUNDED_SECONDS, text


MOST_BYTES = 8
"""What an expression may take of memory for each character of its text."""
WITH_MEMORY = {
    "generation.output._invisible": "reads the bytes of the tokens whose text is held",
    "grammars.patterns.PIECE": "runs in a process of its own, over a pattern of a schema",
}


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "page"])
def test_a_repetition_takes_no_memory_for_each_time(package: str) -> None:
    """As one of a group does, unless it is possessive."""
    for place, expression in of_package(package):
        attacks = Attacks(expression)
        if place in {*BOUNDED, *WITH_MEMORY} or not attacks.repeats_groups:
            continue
        for text in (_text_of(attack, LONG) for attack in islice(attacks, 60)):
            for use in expression.uses:
                assert _memory(attacks.compiled, use, text) < MOST_BYTES * LONG, text[:80]


def test_a_group_that_is_repeated_possessively_is_atomic() -> None:
    """Before Python 3.11.5 such a repetition ends in the middle of a group that begins to match
    (gh-106052), unless the group is atomic."""
    for place, found in expressions().items():
        for expression in found:
            repeated = _possessively_repeated(parser.parse(expression.pattern, expression.flags))
            whole = (len(item) == 1 and str(item[0][0]) in WHOLE for item in repeated)
            assert all(whole), place


WHOLE = {"ATOMIC_GROUP", "IN", "LITERAL", "NOT_LITERAL", "ANY", "CATEGORY"}


def _possessively_repeated(parsed: Any) -> Iterator[Any]:
    for operation, argument in parsed:
        if str(operation) == "POSSESSIVE_REPEAT":
            yield argument[2]
        for inner in argument if isinstance(argument, tuple | list) else (argument,):
            for each in inner if isinstance(inner, list) else (inner,):
                if isinstance(each, parser.SubPattern):
                    yield from _possessively_repeated(each)


def _memory(pattern: re.Pattern[Any], use: str, text: Any) -> int:
    tracemalloc.start()
    try:
        if use in ANCHORED:
            getattr(pattern, use)(text)
        else:
            deque(pattern.finditer(text), maxlen=0)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _bound(place: str) -> int:
    module, name = place.rpartition(".")[0], BOUNDED[place]
    if module.startswith("page."):
        script = (PACKAGE / "api" / "page" / "static" / f"{module[5:]}.js").read_text("utf-8")
        return int(script.partition(f"const {name} = ")[2].partition(";")[0])
    return int(vars(import_module(f"mlx_server.{module}"))[name])
