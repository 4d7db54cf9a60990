"""How an attack is carried out, and what came of it."""

import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.hostile.corpus import Attack, Bytes, Call, Expected, Json, Step

DRIP_SECONDS = 0.05
ENDS = {"stop", "length", "tool_calls", "completed", "incomplete"}
ANSWERS = re.compile(rb'HTTP/1\.[01] (\d{3}) |"type": ?"error", ?"status": ?(\d{3})')
"""Over HTTP, and over a WebSocket."""


@dataclass(frozen=True)
class Outcome:
    steps: tuple[Step, ...]
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def meets(self, expected: Expected) -> bool:
        pairs = zip(self.steps, expected.steps, strict=False)
        return len(self.steps) == len(expected.steps) and all(step in few for step, few in pairs)

    @property
    def error(self) -> Json:
        found: Json = json.loads(self.body)["error"]
        return found

    def is_whole(self) -> bool:
        """A stream has its end, and an answer all of its parts."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            return self.body.endswith(b"data: [DONE]\n\n")
        return _is_whole(json.loads(self.body))


def _is_whole(answer: Any) -> bool:
    choices = answer.get("choices", [])
    ends = [choice["finish_reason"] for choice in choices] + [answer.get("status", "stop")]
    return set(ends) <= ENDS


def carry_out(attack: Attack, http: httpx.Client) -> Outcome:
    sent = attack.sent
    if isinstance(sent, Call):
        return _called(sent, http)
    address = (http.base_url.host, http.base_url.port or 80)
    with socket.create_connection(address, timeout=http.timeout.read) as line:
        received = _told(sent, line, time.monotonic() + (http.timeout.read or 0))
    statuses = [int(status or over_socket) for status, over_socket in ANSWERS.findall(received)]
    return Outcome(tuple(statuses) or ("closes",))


def _called(call: Call, http: httpx.Client) -> Outcome:
    try:
        answer = http.request(
            call.method, call.path, content=call.content(), headers=dict(call.headers)
        )
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        return Outcome(("closes",))
    return Outcome((answer.status_code,), answer.content, answer.headers)


def _told(sent: Bytes, line: socket.socket, deadline: float) -> bytes:
    """All that comes until the other side closes; TimeoutError if it does not."""
    received = b""
    try:
        line.sendall(sent.said)
        if sent.then:
            received = line.recv(1 << 16)
            line.sendall(sent.then)
        while sent.drip and time.monotonic() < deadline:
            line.sendall(sent.drip)
            time.sleep(DRIP_SECONDS)
        while piece := line.recv(1 << 16):
            received += piece
            if sent.then and len(ANSWERS.findall(received)) > 1:
                break  # a WebSocket stays
    except ConnectionError:
        pass
    return received
