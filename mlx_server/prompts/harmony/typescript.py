"""Reduces JSON Schemas to the keywords that openai-harmony can turn into TypeScript."""

from collections.abc import Mapping
from typing import Any

from mlx_server import limits
from mlx_server.grammars.arguments import lists_properties
from mlx_server.grammars.view import View


def for_typescript(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the reduced schema of a tool's parameters; None if it lists none."""
    if not lists_properties(schema):
        return None
    return SchemaReducer(schema).plain({**schema, "type": "object"})


_NOT_WRITTEN = ("$defs", "definitions", "anyOf", "oneOf", "allOf")


class SchemaReducer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._view = View(root)
        self._left = limits.HARMONY_REFERENCES

    def plain(self, schema: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
        """path: one entry per level, the reference that was followed there, or ""."""
        if not isinstance(schema, Mapping) or len(path) > limits.HARMONY_DEPTH:
            return {}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference in path or not self._left:
                return {}
            self._left -= 1
            own = {key: value for key, value in schema.items() if key != "$ref"}
            target = self._view.referred({"$ref": reference})
            inner = target.schema if target and isinstance(target.schema, Mapping) else {}
            return self.plain({**inner, **own}, (*path, reference))
        path = (*path, "")
        found = {key: value for key, value in schema.items() if key not in _NOT_WRITTEN}
        options = _options(schema)
        if len(options) == 1:
            return self.plain({**options[0], **found}, path)
        if options:
            return found | _either([self.plain(option, path) for option in options])
        return self._typed(found, path)

    def _typed(self, found: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        if "const" in found:
            found["enum"] = [found["const"]]
        if isinstance(found.get("properties"), Mapping):
            found.setdefault("type", "object")
            found["properties"] = {k: self.plain(v, path) for k, v in found["properties"].items()}
        if "items" in found:
            found["items"] = self.plain(found["items"], path)
        if found.get("type") == "null":
            found["type"] = ["null"]
        if isinstance(found.get("description"), str):
            found["description"] = "\n// ".join(found["description"].splitlines())
        if _are_words(found.get("enum")):
            found.setdefault("type", "string")
        return found


def _either(options: list[dict[str, Any]]) -> dict[str, Any]:
    types = [option.get("type") for option in options if option.keys() <= {"type", "title"}]
    names = [name for type in types for name in (type if isinstance(type, list) else [type])]
    simple = len(types) == len(options) and all(isinstance(name, str) for name in names)
    return {"type": names} if simple else {"oneOf": options}


def _options(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the alternatives of a schema. Of `allOf` only the first is used: no type can combine
    them."""
    for key, most in (("anyOf", None), ("oneOf", None), ("allOf", 1)):
        found = schema.get(key)
        if isinstance(found, list) and found:
            return [option for option in found if isinstance(option, Mapping)][:most]
    return []


def _are_words(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
