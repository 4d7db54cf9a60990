"""Bodies of /v1/chat/completions, and their answers."""

from typing import Any

import httpx2
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.wire import Json, error

PATH = "/v1/chat/completions"
HI: Json = {"role": "user", "content": "hi"}
BODY: Json = {"model": wire.MODEL, "messages": [HI]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def post(client: TestClient, **asked: Any) -> httpx2.Response:
    return client.post(PATH, json={**BODY, **asked})


def refused(client: TestClient, **asked: Any) -> Json:
    return error(post(client, **asked))
