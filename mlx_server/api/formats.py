"""Output formats on the wire: OpenAI's `response_format`, vLLM's `structured_outputs` and
`guided_*`, llama.cpp's `json_schema` and `grammar`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field, model_validator

from mlx_server import limits
from mlx_server.api.fields import EMPTY_IS_UNSET, GenerationBody, Items, WireModel
from mlx_server.errors import BadRequest
from mlx_server.http import strict_json
from mlx_server.requests import ChoiceFormat, Format, GrammarFormat, JsonFormat, RegexFormat


class TextFormat(WireModel):
    type: Literal["text"]


class JsonObjectFormat(WireModel):
    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """llama.cpp's way to ask for a schema."""


class JsonSchemaParam(WireModel):
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARACTERS)] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaParam

    @model_validator(mode="before")
    @classmethod
    def _llama_cpp(cls, given: Any) -> Any:
        """llama.cpp's README has the schema itself beside the type."""
        if isinstance(given, dict) and "schema" in given and given.get("json_schema") is None:
            rest = {name: value for name, value in given.items() if name != "schema"}
            return {**rest, "json_schema": {"schema": given["schema"]}}
        return given


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]

Schema = dict[str, Any] | Annotated[str, Field(max_length=limits.SCHEMA_BYTES)]
"""A JSON Schema; like vLLM, also as text."""

Pattern = Annotated[str, Field(min_length=1)]
Options = Annotated[Items[str], Field(min_length=1)]


class StructuredOutputs(WireModel):
    """vLLM's `structured_outputs`, without the fields that configure its backends."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Options | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    structural_tag: None = None
    """Known, and refused unless null."""


class FormatChoice(TypedDict):
    format: Format | None
    format_param: str


class ConstrainedBody(GenerationBody):
    response_format: Annotated[ResponseFormat | None, EMPTY_IS_UNSET] = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Options | None = None
    guided_grammar: Pattern | None = None
    json_schema: Schema | None = None
    """llama.cpp's, as `grammar` is."""
    grammar: str | None = None
    """An empty one sets no format."""

    def constrained(self) -> FormatChoice:
        structured = of_structured_outputs(self.structured_outputs)
        found = [*of_response_format(self.response_format), *structured, *self._guided()]
        found += of_llama_cpp(self.json_schema, self.grammar)
        return the_only_format(found, otherwise="response_format")

    def _guided(self) -> Iterator[FormatChoice]:
        yield from _formats(
            "guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )


def of_llama_cpp(
    schema: dict[str, Any] | str | None, grammar: str | None
) -> Iterator[FormatChoice]:
    """What no grammar can enforce of the schema is checked afterwards, as with `json_object`."""
    if schema is not None:
        json = JsonFormat(_schema(schema, "json_schema"), strict=False)
        yield {"format": json, "format_param": "json_schema"}
    if grammar:
        yield {"format": GrammarFormat(grammar), "format_param": "grammar"}


def of_json_object(given: JsonObjectFormat, param: str) -> FormatChoice:
    if given.schema_ is None:
        return {"format": JsonFormat(), "format_param": param}
    return {"format": JsonFormat(given.schema_, strict=False), "format_param": f"{param}.schema"}


def the_only_format(found: Sequence[FormatChoice], otherwise: str) -> FormatChoice:
    """The requested format and its parameter name. Raises BadRequest if there are several."""
    if len(found) > 1:
        one, other = found[0]["format_param"], found[1]["format_param"]
        raise BadRequest(
            f"`{one}` and `{other}` both set the output format: send only one of them.",
            param=other,
        )
    return found[0] if found else {"format": None, "format_param": otherwise}


def of_response_format(
    given: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
) -> Iterator[FormatChoice]:
    match given:
        case JsonObjectFormat():
            yield of_json_object(given, "response_format")
        case JsonSchemaFormat(json_schema=asked):
            json = JsonFormat(asked.schema_, bool(asked.strict), asked.name, asked.description)
            yield {"format": json, "format_param": "response_format.json_schema.schema"}


def of_structured_outputs(given: StructuredOutputs | None) -> Iterator[FormatChoice]:
    if given is None:
        return
    found = list(
        _formats("structured_outputs.", given.json_, given.regex, given.choice, given.grammar)
    )
    if given.json_object:
        found.append({"format": JsonFormat(), "format_param": "structured_outputs.json_object"})
    if not found:
        raise BadRequest(
            "`structured_outputs` needs one of `json`, `regex`, `choice`, `grammar` and "
            "`json_object`.",
            param="structured_outputs",
        )
    yield from found


def prompt_description(format: Format | None) -> Mapping[str, Any] | None:
    """The format as prompts can describe it (see Conversation.response_format)."""
    match format:
        case JsonFormat(schema=schema, name=name, description=description):
            return {"name": name, "description": description, "schema": schema}
        case ChoiceFormat(options):
            return {"choice": list(options)}
        case RegexFormat(pattern):
            return {"regex": pattern}
    return None


def _formats(
    prefix: str,
    json: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[FormatChoice]:
    if json is not None:
        where = f"{prefix}json"
        yield {"format": JsonFormat(_schema(json, where)), "format_param": where}
    if regex is not None:
        yield {"format": RegexFormat(regex), "format_param": f"{prefix}regex"}
    if choice is not None:
        yield {"format": ChoiceFormat(tuple(choice)), "format_param": f"{prefix}choice"}
    if grammar is not None:
        yield {"format": GrammarFormat(grammar), "format_param": f"{prefix}grammar"}


def _schema(given: dict[str, Any] | str, where: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        return strict_json.parse_object(given.encode())
    except (BadRequest, UnicodeEncodeError) as error:
        raise BadRequest(f"`{where}` should be a JSON Schema: {error}", param=where) from None
