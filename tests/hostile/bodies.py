"""Bad bodies without end: valid ones of every POST route, changed by a seeded generator.

The same seed, route and number give the same body, whatever came before.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from random import Random
from typing import Any

from tests.hostile.routes import ROUTES, Json, Route

Place = tuple[str | int, ...]
"""Keys and indices, from the body down."""

BRIEF = {"2": 100}
"""A bias by which the first token of the tiny model is its last, wherever a grammar lets it."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_response_tokens")
FEW = 3
MOST_BYTES = 512 << 10

NUMBERS = (0, 1, -1, 2, 3.0, 0.5, 21, 400, 1e-9, 5e-324, 1e308, -1e308, 2**31, 2**53, 2**63, 2**64)
BEYOND = (-(2**63) - 1, 10**18, 10**399, float("nan"), float("inf"), float("-inf"))
CONSTANTS: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [None], {"": None}, [{}]),
    *("", " ", "\0"),
)
WORDS = (
    *("\ud800", "a\udfffb", "\ufeff", "\r\nx-evil: 1", "<|im_end|><|im_start|>system"),
    *("../../etc/passwd", "{{ 7 * 7 }}", "(a+)+$", 'root ::= root "a"'),
    *("auto", "enabled", "function", "json_schema", "item_reference"),
)


def generated(route: Route, seed: int, number: int) -> bytes:
    random = Random(f"{seed} {route.path} {number}")
    body: Any = random.choice(route.valid)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        body = random.choice(CHANGES)(random, body, route)
    raw = written(random, brief(body))[:MOST_BYTES]
    return random.choice(DAMAGES)(random, raw) if random.random() < 0.15 else raw


def brief(body: Any) -> Any:
    """Of what asks for more than a few tokens, the answer may end at once."""
    if isinstance(body, dict) and any(_is_many(body.get(name)) for name in LIMITS):
        return {"logit_bias": BRIEF, **body}
    return body


def _is_many(limit: Any) -> bool:
    return isinstance(limit, int) and limit > FEW


def written(random: Random, body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=random.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def places(node: Any, here: Place = ()) -> Iterator[Place]:
    """Of all that is in it, outermost first."""
    inside: Any = ()
    if isinstance(node, dict):
        inside = node.items()
    elif isinstance(node, list):
        inside = enumerate(node)
    for key, value in inside:
        yield (*here, key)
        yield from places(value, (*here, key))


def at(body: Any, place: Place) -> Any:
    for key in place:
        body = body[key]
    return body


def put(body: Any, place: Place, value: Any) -> Any:
    """A body with this value there; what did not change is the old one's."""
    if not place:
        return value
    changed = copy(body)
    changed[place[0]] = put(body[place[0]], place[1:], value) if place[1:] else value
    return changed


def without(body: Any, place: Place) -> Any:
    smaller = copy(at(body, place[:-1]))
    del smaller[place[-1]]
    return put(body, place[:-1], smaller)


def junk(random: Random) -> Any:
    match random.randrange(8):
        case 0:
            return random.choice(WORDS)
        case 1:
            return random.choice(WORDS) * random.choice((2, 100, 2000))
        case 2:
            return random.choice(BEYOND)
        case 3:
            return _nested(random.choice(CONSTANTS), random.choice((1, 2, 30, 61, 70)), random)
        case 4:
            return [random.choice(CONSTANTS)] * random.choice((2, 20, 200, 1000))
        case 5:
            return {f"{random.choice(WORDS)}{i}": i for i in range(random.choice((1, 20, 1000)))}
        case 6:
            return random.choice(NUMBERS)
        case _:
            return random.choice(CONSTANTS)


def _nested(value: Any, depth: int, random: Random) -> Any:
    for _ in range(depth):
        value = random.choice(([value], {"a": value}, {"type": "object", "properties": value}))
    return value


def _any_place(random: Random, body: Any) -> Place:
    """Near the top as often as far below, where most of them are."""
    found = list(places(body))
    depth = random.choice(sorted({len(place) for place in found})) if found else 0
    return random.choice([place for place in found if len(place) == depth] or [()])


# Each takes a body, which may be anything by now, and makes another one of it.


def _replaced(random: Random, body: Any, route: Route) -> Any:
    return put(body, _any_place(random, body), junk(random))


def _left_out(random: Random, body: Any, route: Route) -> Any:
    place = _any_place(random, body)
    return without(body, place) if place else {}


def _wrapped(random: Random, body: Any, route: Route) -> Any:
    place = _any_place(random, body)
    return put(body, place, _nested(at(body, place), random.choice((1, 1, 2, 65)), random))


def _swapped(random: Random, body: Any, route: Route) -> Any:
    one, other = sorted((_any_place(random, body), _any_place(random, body)), key=len)
    if one == other[: len(one)]:  # one within the other, which then goes up
        return put(body, one, at(body, other))
    return put(put(body, one, at(body, other)), other, at(body, one))


def _multiplied(random: Random, body: Any, route: Route) -> Any:
    lists = [place for place in places(body) if isinstance(at(body, place), list)]
    if not lists:
        return [body, body]
    place = random.choice(lists)
    return put(body, place, at(body, place) * random.choice((2, 3, 17, 129)))


def _own_field(random: Random, body: Any, route: Route) -> Any:
    """Any parameter that the route knows, with something that one of its others had."""
    name = random.choice(route.fields or ["metadata"])
    values = [at(body, place) for place in places(body)] or [body]
    value = random.choice((junk(random), random.choice(values)))
    return {**body, name: value} if isinstance(body, dict) else {name: value}


def _foreign_field(random: Random, body: Any, route: Route) -> Any:
    other = random.choice(random.choice(ROUTES).valid)
    taken = {name: other[name] for name in random.sample(sorted(other), min(len(other), 2))}
    return {**body, **taken} if isinstance(body, dict) else taken


def _renamed(random: Random, body: Any, route: Route) -> Any:
    keys = [place for place in places(body) if isinstance(place[-1], str)]
    if not keys:
        return {}
    place = random.choice(keys)
    name = random.choice((random.choice(WORDS), f"{place[-1]}s", str(place[-1]).upper()))
    return put(without(body, place), (*place[:-1], name), at(body, place))


CHANGES: Sequence[Callable[[Random, Any, Route], Any]] = (
    _replaced,
    _replaced,
    _own_field,
    _left_out,
    _wrapped,
    _swapped,
    _multiplied,
    _foreign_field,
    _renamed,
)

# And each of these takes its text.


def _cut(random: Random, raw: bytes) -> bytes:
    return raw[: random.randrange(len(raw) + 1)]


def _overwritten(random: Random, raw: bytes) -> bytes:
    start = random.randrange(len(raw))
    end = start + random.randrange(5)
    return raw[:start] + random.randbytes(random.randrange(5)) + raw[end:]


def _said_twice(random: Random, raw: bytes) -> bytes:
    """Its first key, or the body itself."""
    first = raw.partition(b",")[0]
    again = first + b"," + raw[1:] if raw.startswith(b"{") and first != raw else raw
    return random.choice((again, raw + raw))


def _in_other_words(random: Random, raw: bytes) -> bytes:
    encoding = random.choice(("utf-16", "utf-8-sig", "utf-32"))
    return raw.decode("utf-8", "replace").encode(encoding)


DAMAGES: Sequence[Callable[[Random, bytes], bytes]] = (
    _cut,
    _overwritten,
    _overwritten,
    _said_twice,
    _in_other_words,
)


def shrunk(body: Json, fails: Callable[[Json], bool]) -> Json:
    """As little of it as still fails."""
    for place in places(body):
        if fails(smaller := without(body, place)):
            return shrunk(smaller, fails)
    return body
