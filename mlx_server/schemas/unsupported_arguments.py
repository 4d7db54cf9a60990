"""Finds the keywords of a tool's schema that are not enforced in arguments that are not written as
JSON."""

from collections.abc import Iterator, Mapping
from itertools import chain

from mlx_server.messages import Tool
from mlx_server.schemas.members import flattened, members, properties_of, required_of
from mlx_server.schemas.patterns import search_pattern
from mlx_server.schemas.report import UnsupportedKeyword
from mlx_server.schemas.variants import Variant, variants_of
from mlx_server.schemas.view import Part, View, children

IN_PLACE = ("allOf", "anyOf", "oneOf")


def unsupported_one_by_one(tool: Tool) -> list[UnsupportedKeyword]:
    """Returns the keywords that are not enforced in arguments written one by one, besides those
    that are not enforced in JSON either."""
    return list(
        dict.fromkeys(chain.from_iterable(map(_unsupported_members, variants_of(tool.parameters))))
    )


def unsupported_as_text(tool: Tool) -> list[UnsupportedKeyword]:
    """Returns the same keywords for arguments written as text between delimiters."""
    patterns = chain.from_iterable(map(_unsupported_patterns, variants_of(tool.parameters)))
    return list(dict.fromkeys([*unsupported_one_by_one(tool), *patterns]))


def _unsupported_members(variant: Variant) -> Iterator[UnsupportedKeyword]:
    for choice in variant.choices():
        yield UnsupportedKeyword(
            choice.path[:-1], choice.path[-1], "can't be enforced as this model writes calls"
        )
    for path, schema in flattened(Part((), variant.schema), View(variant.schema)):
        if isinstance(schema, Mapping) and schema.get("patternProperties"):
            yield UnsupportedKeyword(
                path, "patternProperties", "can't be enforced as this model writes calls"
            )


def _unsupported_patterns(variant: Variant) -> Iterator[UnsupportedKeyword]:
    view = View(variant.schema)
    for key in {**properties_of(variant.schema), **dict.fromkeys(required_of(variant.schema))}:
        for path, schema in _in_place(view, members(view, key)):
            if not isinstance(schema, bool) and search_pattern(schema.get("pattern", "")) is None:
                yield UnsupportedKeyword(
                    path, "pattern", "can't be enforced as this model writes text"
                )


def _in_place(view: View, parts: list[Part]) -> Iterator[Part]:
    """Yields these schemas, and all schemas that they apply to the same values by reference."""
    waiting, seen = list(parts), set()
    while waiting:
        part = waiting.pop(0)
        if part.path in seen:
            continue
        seen.add(part.path)
        yield part
        target, at = view.target(part), len(part.path)
        inside = [inner for inner in children(part) if inner.path[at] in IN_PLACE]
        waiting += [*([target] if target else []), *inside]
