"""No field vanishes without a word: at every depth it is known, refused by name, or listed."""

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from fastapi.routing import APIRoute
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat import completion_list_params, completion_update_params
from openai.types.chat.completions import message_list_params
from openai.types.conversations import (
    conversation_create_params,
    conversation_update_params,
    item_create_params,
    item_list_params,
    item_retrieve_params,
)
from openai.types.fine_tuning import job_create_params
from openai.types.responses import (
    input_item_list_params,
    input_token_count_params,
    response_create_params,
    response_retrieve_params,
)
from pydantic import BaseModel, ValidationError
from typing_extensions import is_typeddict

from mlx_server.api import conversations
from mlx_server.api.batches import BatchBody
from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.chat_completions.routes import PATH as CHAT
from mlx_server.api.chat_completions.routes import filter_of
from mlx_server.api.chat_completions.routes import router as chat_router
from mlx_server.api.completions import CompletionBody
from mlx_server.api.conversations import PATH as CONVERSATIONS
from mlx_server.api.conversations import ConversationBody, ItemsBody, UpdateBody
from mlx_server.api.embeddings import EmbeddingsBody
from mlx_server.api.fields import WireModel
from mlx_server.api.fine_tuning import JobBody
from mlx_server.api.messages.input import MessagesBody, PromptBody
from mlx_server.api.replay import GivenBody
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.routes import PATH as RESPONSES
from mlx_server.api.responses.routes import router as responses_router
from mlx_server.api.responses.routes import without_effect
from mlx_server.errors import BadRequest
from mlx_server.http.errors import validation_error
from tests.hostile.routes import ROUTES

Json = dict[str, Any]
Path = tuple[str, ...]

PROBE = "frobnicate"
WIRE_TYPES: set[type[WireModel]] = {GivenBody, *(route.wire_type for route in ROUTES)}
BODIES = sorted(WIRE_TYPES, key=lambda wire: (wire.__name__, wire.__module__))


# Every object of our own wire types


def schema_of(wire: type[BaseModel]) -> Json:
    return wire.model_json_schema()


class Objects:
    """The objects of a JSON schema, each within the shortest body that has it."""

    def __init__(self, schema: Json) -> None:
        self._definitions: Json = schema.get("$defs", {})

    def resolved(self, schema: Json) -> Json:
        name = schema.get("$ref", "").rpartition("/")[2]
        return self._definitions[name] if name else schema

    def shortest(self, schema: Json) -> Any:
        schema = self.resolved(schema)
        for name in ("const", "default"):
            if name in schema:
                return schema[name]
        if "enum" in schema:
            return schema["enum"][0]
        if either := schema.get("anyOf") or schema.get("oneOf"):
            return self.shortest(either[0])
        match schema.get("type"):
            case "object":
                members = schema.get("properties", {})
                return {name: self.shortest(members[name]) for name in schema.get("required", ())}
            case "array":
                return [self.shortest(schema["items"])] if schema.get("minItems") else []
            case "string":
                return "x" * schema.get("minLength", 1)
            case "integer" | "number":
                return max(1, schema.get("minimum", 1))
        return True

    def walk(self, schema: Json, path: Path = ()) -> Iterator[tuple[Path, Any]]:
        """Values of this schema with one field too many somewhere, and its path."""
        schema = self.resolved(schema)
        for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from self.walk(one, path)
        if "items" in schema:
            for inner, value in self.walk(schema["items"], path):
                yield inner, [value]
        if "properties" not in schema:
            return
        shortest = self.shortest(schema)
        yield (*path, PROBE), {**shortest, PROBE: 1}
        for name, member in schema["properties"].items():
            for inner, value in self.walk(member, (*path, name)):
                yield inner, {**shortest, name: value}


def reported(wire: type[WireModel], body: Json) -> list[str]:
    """What is listed as ignored."""
    try:
        return wire.model_validate(body).ignored()
    except ValidationError as error:
        raise AssertionError(body) from error


@pytest.mark.parametrize("wire", BODIES, ids=lambda wire: wire.__name__)
def test_an_unknown_field_is_listed_by_its_path(wire: type[WireModel]) -> None:
    schema = schema_of(wire)
    for path, body in Objects(schema).walk(schema):
        found = reported(wire, body)
        whole = "".join(f"{name}." for name in path[:-1])
        is_within = whole and any(name.startswith(whole) for name in found)
        assert ".".join(path) in found or is_within, (path, found)


def test_the_walk_reaches_every_wire_type() -> None:
    def all_types(wire: type[BaseModel]) -> Iterator[type[BaseModel]]:
        yield from (each for child in wire.__subclasses__() for each in (child, *all_types(child)))

    reached = {wire.__name__ for wire in BODIES}
    reached |= {name for wire in BODIES for name in schema_of(wire).get("$defs", ())}
    ours = (each for each in all_types(WireModel) if each.__module__.startswith("mlx_server."))
    names = {each.__name__ for each in ours if not each.__subclasses__()}
    assert names <= reached


# Every field that the SDKs can send, as their typed dictionaries have it


NEEDED: Mapping[str, Json] = {
    "FunctionCallOutput": {"call_id": "x"},
    "JSONSchema": {"schema": {}},
    "ChatCompletionAllowedToolsParam": {
        "tools": [{"type": "function", "function": {"name": "x"}}],
    },
    "ToolChoiceAllowedParam": {"tools": [{"type": "function", "name": "x"}]},
}
"""What this server requires where the SDKs' types don't."""


class SdkFields:
    """The shortest bodies of a typed dictionary that have each of its fields, at every depth."""

    def shortest(self, hint: Any) -> Any:
        hint = _bare(hint)
        if is_typeddict(hint):
            hints = get_type_hints(hint, include_extras=True)
            required = {n: self.shortest(h) for n, h in hints.items() if _is_required(hint, h)}
            return required | NEEDED.get(hint.__name__, {})
        if get_origin(hint) is Literal:
            return get_args(hint)[0]
        if get_origin(hint) in (Union, types.UnionType):
            return self.shortest(next(each for each in get_args(hint) if each is not type(None)))
        if _is_list(hint):
            return [self.shortest(get_args(hint)[0])]
        return {str: "x", int: 1, float: 1.0, bool: True}.get(hint, {})

    def walk(self, hint: Any, path: Path = (), above: Path = ()) -> Iterator[tuple[Path, Any]]:
        hint = _bare(hint)
        if get_origin(hint) in (Union, types.UnionType):
            for each in get_args(hint):
                yield from self.walk(each, path, above)
        elif _is_list(hint):
            for inner, value in self.walk(get_args(hint)[0], path, above):
                yield inner, [value]
        elif is_typeddict(hint) and hint.__name__ not in above:
            shortest = self.shortest(hint)
            for name, member in get_type_hints(hint, include_extras=True).items():
                here = (*path, name)
                yield here, {**shortest, name: self.shortest(member)}
                for inner, value in self.walk(member, here, (*above, hint.__name__)):
                    yield inner, {**shortest, name: value}


def _bare(hint: Any) -> Any:
    while get_origin(hint) in (Annotated, Required, NotRequired):
        hint = get_args(hint)[0]
    return hint


def _is_required(of: Any, hint: Any) -> bool:
    return get_origin(hint) is Required or (of.__total__ and get_origin(hint) is not NotRequired)


def _is_list(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Iterable) and len(get_args(hint)) == 1


LABELS = {
    *("metadata", "cache_control"),  # whatever they have
    *("input", "annotations", "logprobs"),  # of earlier output, which is not read again
}


def is_known(node: Any, path: Path) -> bool:
    """Whether the wire types have a field of this path, or report all of an object within it."""
    if isinstance(node, list):
        return any(is_known(each, path) for each in node)
    head, *rest = path
    if isinstance(node, dict):
        return True  # of any fields, such as a schema
    if not isinstance(node, WireModel):
        return False
    if node.ignored_as() is not None:  # reported whole, here or by generation
        return True
    names = {field.alias or name: name for name, field in type(node).model_fields.items()}
    if head in LABELS or head in node.ACCEPTED:
        return True
    if head not in names:
        return False
    return not rest or is_known(getattr(node, names[head]), tuple(rest))


SDKS: Sequence[tuple[type[WireModel], Any]] = [
    (ChatBody, chat_create_params.CompletionCreateParamsNonStreaming),
    (UpdateBody, completion_update_params.CompletionUpdateParams),
    (CompletionBody, completion_create_params.CompletionCreateParamsNonStreaming),
    (EmbeddingsBody, embedding_create_params.EmbeddingCreateParams),
    (ResponsesBody, response_create_params.ResponseCreateParamsNonStreaming),
    (ResponsesBody, input_token_count_params.InputTokenCountParams),
    (ConversationBody, conversation_create_params.ConversationCreateParams),
    (UpdateBody, conversation_update_params.ConversationUpdateParams),
    (ItemsBody, item_create_params.ItemCreateParams),
    (BatchBody, batch_create_params.BatchCreateParams),
    (JobBody, job_create_params.JobCreateParams),
    (MessagesBody, message_create_params.MessageCreateParamsNonStreaming),
    (MessagesBody, beta_message_create_params.MessageCreateParamsNonStreaming),
    (PromptBody, message_count_tokens_params.MessageCountTokensParams),
    (PromptBody, beta_count_tokens_params.MessageCountTokensParams),
]
"""The bodies of every route that OpenAI and Anthropic have too. The SDKs' types are made from the
documents that they publish."""


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "body"), SDKS, ids=lambda each: each.__name__)
def test_no_field_of_the_sdks_is_silent(wire: type[WireModel], body: Any) -> None:
    fates: dict[str, set[str]] = {}
    for path, sent in SdkFields().walk(body):
        whole = {"model": "tiny", **sent} if "model" in wire.model_fields else sent
        fates.setdefault(".".join(path), set()).add(fate_of(wire, path, whole))
    assert {path for path, found in fates.items() if "silent" in found} == set()
    # a field is not tried by a body that is refused for another one
    assert {path for path, found in fates.items() if found == {"untried"}} == set()


def fate_of(wire: type[WireModel], path: Path, body: Json) -> str:
    try:
        parsed = wire.model_validate(body)
        ignored = parsed.ignored()
    except ValidationError as error:
        return _fate_of_refused(path, validation_error(error, body))
    except BadRequest as error:
        return _fate_of_refused(path, error)
    above = {".".join(path[:end]) for end in range(1, len(path) + 1)}
    return "found_reports" if above & set(ignored) or is_known(parsed, path) else "silent"


def _fate_of_refused(path: Path, error: BadRequest) -> str:
    named = re.sub(r"\[\d+\]", "", error.param or "").split(".")
    shared = min(len(named), len(path))
    return "found_reports" if named[:shared] == list(path[:shared]) else "untried"


# Every parameter of a query that OpenAI's SDK can send

QUERIES: Mapping[str, Any] = {
    f"GET {CHAT}": completion_list_params.CompletionListParams,
    f"GET {CHAT}/{{id}}/messages": message_list_params.MessageListParams,
    f"GET {RESPONSES}/{{id}}": response_retrieve_params.ResponseRetrieveParamsStreaming,
    f"GET {RESPONSES}/{{id}}/input_items": input_item_list_params.InputItemListParams,
    f"GET {CONVERSATIONS}/{{id}}/items": item_list_params.ItemListParams,
    f"GET {CONVERSATIONS}/{{id}}/items/{{item}}": item_retrieve_params.ItemRetrieveParams,
    f"POST {CONVERSATIONS}/{{id}}/items": item_create_params.ItemCreateParams,
}
ELSEWHERE = {"conversation_id", "items"}
"""In the path, and in the body."""
READERS = {
    without_effect: {"include", "include_obfuscation"},
    filter_of: {"model", "metadata"},
}
"""Functions that read a query by themselves, since it has lists and objects."""


@pytest.mark.parametrize("route", list(QUERIES))
def test_no_parameter_of_a_query_is_silent(route: str) -> None:
    method, _, path = route.partition(" ")
    routers = (chat_router, responses_router, conversations.router)
    (found,) = (
        each
        for router in routers
        for each in router.routes
        if isinstance(each, APIRoute) and (each.path, each.methods) == (path, {method})
    )
    known = {param.alias for param in found.dependant.query_params}
    code = found.endpoint.__code__
    for reader, names in READERS.items():
        known |= names if reader.__name__ in code.co_names else set()
    assert set(get_type_hints(QUERIES[route])) - ELSEWHERE - known == set()
