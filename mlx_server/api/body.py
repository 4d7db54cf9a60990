"""Reads a request's body into a wire type."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from mlx_server.api import strict_json
from mlx_server.api.errors import validation_error
from mlx_server.api.histories import WITHOUT_MENDING
from mlx_server.request_threads import in_thread, size_of_request

Body = TypeVar("Body", bound=BaseModel)

JSON = "application/json"

LARGE_BYTES = 64 << 10
"""Bodies over this are parsed off the event loop. So is the first of each type, which has to wait
for its validator."""


async def read(http: Request, wire_type: type[Body]) -> Body:
    """Raises BadRequest for a body that is not strict JSON or not of this type."""
    # not `http.body()`, which keeps the bytes until the response is sent
    raw = b"".join([chunk async for chunk in http.stream()])
    http.state.body_bytes = len(raw)
    size_of_request.set(len(raw))
    if len(raw) > LARGE_BYTES or not wire_type.__pydantic_complete__:
        return await in_thread(_parsed, raw, wire_type)
    body = strict_json.parse_request(raw)
    try:
        return wire_type.model_validate(body, context=WITHOUT_MENDING)
    except ValidationError:
        return await in_thread(_validated, body, wire_type)


def _parsed(raw: bytes, wire_type: type[Body]) -> Body:
    return _validated(strict_json.parse_request(raw), wire_type)


def _validated(body: Any, wire_type: type[Body]) -> Body:
    try:
        return wire_type.model_validate(body)
    except ValidationError as error:
        raise validation_error(error, body) from None


_wire_types: dict[str, type[BaseModel]] = {}
"""What `read` parses for each path."""


def documented(path: str, wire_type: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: FastAPI does not see a body that `read` parses."""
    _wire_types[path] = wire_type
    return {"requestBody": {"required": True, "content": {JSON: {}}}}


def describe_bodies(openapi: Mapping[str, Any]) -> None:
    """Adds the schemas of the bodies, which a server's start does not wait for: they take 0.2 s."""
    for path, operations in openapi["paths"].items():
        if wire_type := _wire_types.get(path):
            place = path.replace("/", "~1").replace("{", "{{").replace("}", "}}")
            here = f"#/paths/{place}/post/requestBody/content/application~1json/schema"
            schema = wire_type.model_json_schema(ref_template=here + "/$defs/{model}")
            operations["post"]["requestBody"]["content"][JSON]["schema"] = schema
