"""`mlx-server replay record --upstream`: the answers of any OpenAI-compatible server, in words."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx

from mlx_server import limits
from mlx_server.clients.chat import JSON, checked_url, parsed_json
from mlx_server.errors import BadRequest, GenerationFailed, Unavailable

Entry = dict[str, Any]

TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True)
class RecordedServer:
    url: str
    """Its base URL, such as `http://127.0.0.1:8001/v1`."""
    model: str
    key: str | None = None

    def answers(self, bodies: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
        """The `answer` of a transcript's entry to each body of /v1/chat/completions."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        url = checked_url(self.url, "The URL after --upstream")
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT) as client:
            for number, body in enumerate(bodies, 1):
                yield _answer(self._asked(client, body, number), number)

    def _asked(self, client: httpx.Client, body: Mapping[str, Any], number: int) -> Any:
        whole = {**body, "model": self.model, "stream": False}
        sent = client.build_request(
            "POST", "/chat/completions", content=json.dumps(whole), headers=JSON
        )
        try:
            response = client.send(sent, stream=True)
            found = parsed_json(_body(response, number))
        except httpx.HTTPError as error:
            raise Unavailable(
                f"The server at --upstream did not answer request {number}: "
                f"{type(error).__name__}. Check the URL, and that the server runs."
            ) from None
        if not response.is_success:
            raise BadRequest(
                f"The server at --upstream refused request {number} (HTTP {response.status_code})"
                f"{_message(found)}"
            )
        return found


def _body(response: httpx.Response, number: int) -> bytes:
    body = bytearray()
    with closing(response):
        for piece in response.iter_bytes():
            body += piece
            if len(body) > (most := limits.UPSTREAM_LINE_BYTES):
                raise GenerationFailed(
                    f"The answer to request {number} is larger than {most >> 20} MiB."
                )
    return bytes(body)


def _answer(found: Any, number: int) -> Entry:
    try:
        message = found["choices"][0]["message"]
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
        answer = {"reasoning": reasoning, "text": message.get("content") or "", "calls": calls}
    except (TypeError, KeyError, IndexError, AttributeError, ValueError):
        raise GenerationFailed(
            f"The answer to request {number} is not in the format of OpenAI's chat completions."
        ) from None
    return {name: value for name, value in answer.items() if value} or {"text": ""}


def _call(function: Mapping[str, Any]) -> Entry:
    arguments = function.get("arguments") or {}
    made = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(made, dict):
        raise TypeError("the arguments are no object")
    return {"name": function["name"], "arguments": made}


def _message(found: Any) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {message[:500]}" if isinstance(message, str) else "."
