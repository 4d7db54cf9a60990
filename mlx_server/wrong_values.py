"""Says what is wrong with a value that pydantic refuses, in the words of a file or a request."""

import re
from collections.abc import Mapping
from typing import Any

WORDS = {
    "missing": "is missing",
    "none_required": "should be null",
    "string_type": "should be a string",
    "string_sub_type": "should be a string",
    "string_too_short": "should have at least {min_length} characters",
    "string_too_long": "should have at most {max_length} characters",
    "string_pattern_mismatch": "should match {pattern}",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "int_parsing_size": "is too large",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "finite_number": "should be a finite number",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "bytes_type": "should be a string",
    "list_type": "should be a list",
    "tuple_type": "should be a list",
    "set_type": "should be a list",
    "frozen_set_type": "should be a list",
    "dict_type": "should be an object",
    "mapping_type": "should be an object",
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
    "dataclass_type": "should be a mapping",
    "is_instance_of": "should be a {class}",
    "path_type": "should be a path",
    "too_short": "should have at least {min_length} items",
    "too_long": "should have at most {max_length} items",
    "greater_than": "should be greater than {gt}",
    "greater_than_equal": "should be at least {ge}",
    "less_than": "should be less than {lt}",
    "less_than_equal": "should be at most {le}",
    "multiple_of": "should be a multiple of {multiple_of}",
    "literal_error": "should be {expected}",
    "enum": "should be {expected}",
    "union_tag_invalid": "should have {discriminator} as one of {expected_tags}",
    "union_tag_not_found": "should have {discriminator}",
    "extra_forbidden": "unknown key: remove it",
}
"""By pydantic's names of errors, filled in from an error's context."""

ONE_OF_MANY = re.compile("( 1 (item|character))s")


def sentence(problem: Mapping[str, Any]) -> str:
    """problem: one entry of pydantic's `errors()`. None of its sentences repeats the value."""
    words = WORDS.get(problem["type"])
    if words is None:  # raised by a validator of ours, or of a kind that no field here has
        text: str = problem["msg"]
        return text.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    context = {name: _plain(value) for name, value in problem.get("ctx", {}).items()}
    return ONE_OF_MANY.sub(r"\1", words.format_map(context))


def _plain(value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value
