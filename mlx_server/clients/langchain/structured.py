"""Structured output by the three methods that LangChain defines."""

from operator import itemgetter
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import OutputParserLike
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

Method = Literal["json_schema", "function_calling", "json_mode"]

Schema = dict[str, Any] | type


def bound(schema: Schema | None, method: Method, strict: bool | None) -> dict[str, Any]:
    """The request fields that make the answer follow the schema by this method."""
    if method == "json_mode":
        wanted: dict[str, Any] = {"response_format": {"type": "json_object"}}
    elif schema is None:
        raise ValueError(f"The method {method} needs a schema.")
    elif method == "json_schema":
        wanted = {"response_format": _response_format(schema, strict)}
    else:
        tool = convert_to_openai_tool(schema, strict=strict)
        named = {"type": "function", "function": {"name": tool["function"]["name"]}}
        wanted = {"tools": [tool], "tool_choice": named, "parallel_tool_calls": False}
    shown = convert_to_json_schema(schema) if schema is not None else None
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": shown}
    return {**wanted, "ls_structured_output_format": traced}


def parser_of(schema: Schema | None, method: Method) -> OutputParserLike[Any]:
    # a Pydantic model gives objects of itself, any other schema gives dictionaries
    model: Any = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    if method == "function_calling" and schema is not None:
        if model:
            return PydanticToolsParser(tools=[model], first_tool_only=True)
        name = convert_to_openai_tool(schema)["function"]["name"]
        return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return PydanticOutputParser(pydantic_object=model) if model else JsonOutputParser()


def parsed_by(
    llm: Runnable[LanguageModelInput, Any], parser: OutputParserLike[Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """`llm` followed by `parser`.

    include_raw: whether the output is a dictionary of the message, the parsed value and the error.
    """
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _response_format(schema: Schema, strict: bool | None) -> dict[str, Any]:
    if isinstance(schema, dict) and "schema" in schema and "name" in schema:
        return {"type": "json_schema", "json_schema": dict(schema)}
    function = convert_to_openai_tool(schema, strict=strict)["function"]
    wanted = {"name": function["name"], "schema": function["parameters"]}
    about = {"description": function["description"]} if function.get("description") else {}
    return {
        "type": "json_schema",
        "json_schema": {**wanted, **about, "strict": strict is not False},
    }
