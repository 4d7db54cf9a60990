"""Output formats on the wire: OpenAI's `response_format`, vLLM's `structured_outputs` and
`guided_*`, llama.cpp's `json_schema` and `grammar`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from pydantic import BeforeValidator, Field, model_validator

from mlx_server import limits
from mlx_server.api.fields import EMPTY_IS_UNSET, GenerationBody, Items, WireModel, the_only
from mlx_server.errors import BadRequest
from mlx_server.http import strict_json
from mlx_server.requests import ChoiceFormat, Format, GrammarFormat, JsonFormat, RegexFormat


class TextFormat(WireModel):
    type: Literal["text"]


class JsonObjectFormat(WireModel):
    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """llama.cpp's way to ask for a schema."""


def _unquoted(value: Any) -> Any:
    return value == "true" if value in ("true", "false") else value


class JsonSchemaParam(WireModel):
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARACTERS)] | None = None
    description: str | None = None
    strict: Annotated[bool | None, BeforeValidator(_unquoted)] = None
    """A text in the example of LM Studio's documentation."""

    def format(self) -> JsonFormat:
        return JsonFormat(self.schema_, bool(self.strict), self.name, self.description)


class JsonSchemaFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaParam

    @model_validator(mode="before")
    @classmethod
    def _llama_cpp(cls, format: Any) -> Any:
        """llama.cpp's README has the schema itself next to the type."""
        if isinstance(format, dict) and "schema" in format and format.get("json_schema") is None:
            others = {name: value for name, value in format.items() if name != "schema"}
            return {**others, "json_schema": {"schema": format["schema"]}}
        return format


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


KINDS = ("json", "regex", "choice", "grammar")
"""What vLLM's parameters end with."""


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
        guided = {name: getattr(self, f"guided_{name}") for name in KINDS}
        choices = [
            *of_response_format(self.response_format),
            *of_structured_outputs(self.structured_outputs),
            *_choices("guided_", guided),
        ]
        if self.json_schema is not None:
            # what no grammar can enforce of it is checked afterwards, as with `json_object`
            json = JsonFormat(_schema(self.json_schema, "json_schema"), strict=False)
            choices.append({"format": json, "format_param": "json_schema"})
        if self.grammar:
            choices.append({"format": GrammarFormat(self.grammar), "format_param": "grammar"})
        return the_only_format(choices, otherwise="response_format")


def of_json_object(format: JsonObjectFormat, param: str) -> FormatChoice:
    if format.schema_ is None:
        return {"format": JsonFormat(), "format_param": param}
    return {"format": JsonFormat(format.schema_, strict=False), "format_param": f"{param}.schema"}


def the_only_format(choices: Sequence[FormatChoice], otherwise: str) -> FormatChoice:
    """The requested format and its parameter name. Raises BadRequest if there are several."""
    the_only({each["format_param"]: each for each in choices}, "both set the output format")
    return choices[0] if choices else {"format": None, "format_param": otherwise}


def of_response_format(
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
) -> Iterator[FormatChoice]:
    match format:
        case JsonObjectFormat():
            yield of_json_object(format, "response_format")
        case JsonSchemaFormat(json_schema=described):
            param = "response_format.json_schema.schema"
            yield {"format": described.format(), "format_param": param}


def of_structured_outputs(outputs: StructuredOutputs | None) -> Iterator[FormatChoice]:
    if outputs is None:
        return
    values: dict[str, Any] = {"json": outputs.json_, "regex": outputs.regex}
    values |= {"choice": outputs.choice, "grammar": outputs.grammar}
    choices = list(_choices("structured_outputs.", values))
    if outputs.json_object:
        choices.append({"format": JsonFormat(), "format_param": "structured_outputs.json_object"})
    if not choices:
        raise BadRequest(
            "`structured_outputs` needs one of `json`, `regex`, `choice`, `grammar` and "
            "`json_object`.",
            param="structured_outputs",
        )
    yield from choices


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


def _choices(prefix: str, values: Mapping[str, Any]) -> Iterator[FormatChoice]:
    for kind, value in values.items():
        param = f"{prefix}{kind}"
        match kind:
            case _ if value is None:
                continue
            case "json":
                format: Format = JsonFormat(_schema(value, param))
            case "regex":
                format = RegexFormat(value)
            case "choice":
                format = ChoiceFormat(tuple(value))
            case _:
                format = GrammarFormat(value)
        yield {"format": format, "format_param": param}


def _schema(schema: dict[str, Any] | str, where: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        return strict_json.parse_object(schema.encode())
    except (BadRequest, UnicodeEncodeError) as error:
        raise BadRequest(f"`{where}` should be a JSON Schema: {error}", param=where) from None
