"""What IBM's `ModelInference` and ours make of the same HTTP, as recorded in exchanges.json.

`python -m tests.clients.watsonx.exchanges` records it again, where IBM's package is installed. No
request leaves the process: a transport answers them in place of IBM's cloud.
"""

import asyncio
import base64
import importlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mlx_server.clients.watsonx import ModelInference
from tests.clients.recorded import WEATHER, Wire, chunks, completion

FILE = Path(__file__).with_name("exchanges.json")
URL, MODEL = "https://us-south.ml.cloud.ibm.com", "openai/gpt-oss-120b"
PROJECT = "11111111-2222-4333-8444-555555555555"
TOKEN_SECONDS = 3600

MADE_ID = re.compile(r"call_[0-9a-f]{24}")

ASKED: list[Wire] = [{"role": "user", "content": "What is the weather in Paris?"}]
CALLED = (
    "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)
SAID = (
    "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>final<|message|>"
    "It rains.<|return|>"
)
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOLS: Wire = {"tools": [WEATHER], "tool_choice_option": "auto"}


@dataclass(frozen=True)
class Exchange:
    method: str
    given: Wire
    answers: tuple[Any, ...]
    """A body for each request that is made, or the chunks of a stream."""


def generated(text: str, reason: str = "eos_token") -> Wire:
    counts = {"generated_token_count": 5, "input_token_count": 7}
    return {
        "model_id": MODEL,
        "results": [{"generated_text": text, "stop_reason": reason, **counts}],
    }


def in_pieces(text: str) -> list[Wire]:
    pieces = [text[at : at + 9] for at in range(0, len(text), 9)]
    return [*(generated(piece, "not_finished") for piece in pieces), generated("")]


def both(name: str, given: Wire, said: Wire) -> dict[str, Exchange]:
    """An answer in one, awaited and streamed."""
    made = completion(**{"content": None, **said})
    stream = chunks(said)
    return {
        name: Exchange("chat", given, (made,)),
        f"{name}, awaited": Exchange("achat", given, (made,)),
        f"{name}, streamed": Exchange("chat_stream", given, (stream,)),
        f"{name}, streamed and awaited": Exchange("achat_stream", given, (stream,)),
    }


BROKEN = {"index": 0, "id": "call_1", "type": "function"}
BROKEN |= {"function": {"name": "get_weather<|channel|>x", "arguments": "{'city': 'Paris',}"}}

EXCHANGES: Mapping[str, Exchange] = {
    **both("an answer as it should be", {"messages": ASKED}, {"content": "It rains."}),
    **both("thoughts apart", {"messages": ASKED}, {"reasoning_content": "Hm.", "content": "Yes."}),
    **both("an answer among the thoughts", {"messages": ASKED}, {"reasoning_content": SAID}),
    **both("a leaked call", {"messages": ASKED, **TOOLS}, {"content": CALLED}),
    **both("a broken call", {"messages": ASKED, **TOOLS}, {"tool_calls": [BROKEN]}),
    "a schema that is ignored": Exchange(
        "chat",
        {"messages": ASKED, "params": {"response_format": PERSON, "max_tokens": 50}},
        (completion("Five."), completion('{"age": 5}')),
    ),
    "a text": Exchange("generate_text", {"prompt": "Weather?"}, (generated(SAID),)),
    "a text with its counts": Exchange(
        "generate_text", {"prompt": "Weather?", "raw_response": True}, (generated(SAID),)
    ),
    "texts": Exchange(
        "generate_text",
        {"prompt": ["Weather?", "And now?"], "concurrency_limit": 1},
        (generated(SAID), generated("It snows.")),
    ),
    "a text, streamed": Exchange(
        "generate_text_stream", {"prompt": "Weather?"}, (in_pieces(SAID),)
    ),
}


def outcome(model: Any, exchange: Exchange) -> Any:
    """What the method returns, or all that it yields."""
    method = getattr(model, exchange.method)
    match exchange.method:
        case "achat":
            return asyncio.run(method(**exchange.given))
        case "achat_stream":
            return asyncio.run(_gathered(method, exchange.given))
        case "chat_stream" | "generate_text_stream":
            return list(method(**exchange.given))
    return method(**exchange.given)


async def _gathered(method: Any, given: Wire) -> list[Any]:
    stream = method(**given)
    stream = await stream if hasattr(stream, "__await__") else stream
    return [each async for each in stream]


@dataclass
class Cloud:
    """Answers in place of IBM's cloud, and keeps what was asked."""

    answers: list[Any]
    requests: list[Wire] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/identity/token"):
            return httpx.Response(200, json=_token())
        if request.method == "GET":
            return httpx.Response(
                200, json={"entity": {"storage": {"type": "bmcos_object_storage"}}}
            )
        body = json.loads(request.content)
        self.requests.append({"path": request.url.path, "body": body})
        answer = self.answers.pop(0)
        if isinstance(answer, Mapping):
            return httpx.Response(200, json=answer)
        lines = [f"id: {i}\nevent: message\ndata: {json.dumps(e)}\n" for i, e in enumerate(answer)]
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, text="\n".join([*lines, ""]))


def _token() -> Wire:
    end = int(time.time()) + TOKEN_SECONDS
    parts = ({"alg": "none"}, {"exp": end, "iat": end - TOKEN_SECONDS, "iam_id": "IBMid-1"})
    head, payload = (base64.urlsafe_b64encode(json.dumps(part).encode()) for part in parts)
    text = f"{head.decode()}.{payload.decode()}.x".replace("=", "")
    return {"access_token": text, "expires_in": TOKEN_SECONDS, "expiration": end}


@contextmanager
def vendors(cloud: Cloud) -> Iterator[Any]:
    """An object of IBM's class."""
    package = importlib.import_module("ibm_watsonx_ai")
    models = importlib.import_module("ibm_watsonx_ai.foundation_models")
    transport = httpx.MockTransport(cloud)
    with httpx.Client(transport=transport) as http:
        client = package.APIClient(
            package.Credentials(url=URL, api_key="k" * 44),
            httpx_client=http,
            async_httpx_client=httpx.AsyncClient(transport=transport),
        )
        yield models.ModelInference(
            model_id=MODEL, api_client=client, project_id=PROJECT, validate=False
        )


def of_installed_package(exchange: Exchange) -> Wire:
    """The requests of IBM's object, and what it returns alone and within ours."""
    found: Wire = {}
    for name, wrap in (("raw", lambda model: model), ("read", ModelInference.around)):
        cloud = Cloud(list(exchange.answers))
        with vendors(cloud) as model:
            found[name] = outcome(wrap(model), exchange)
        found[f"{name}_requests"] = cloud.requests
    return found


def shown(read: Any) -> Any:
    """What our object returns, without its random ids, and with a stream put together."""
    if isinstance(read, list) and isinstance(read[0], Mapping):
        read = _folded(read)
    return json.loads(MADE_ID.sub("call_made", json.dumps(read)))


def _folded(stream: list[Wire]) -> Wire:
    message: Wire = {}
    rest: Wire = {}
    for chunk in stream:
        rest |= {name: chunk[name] for name in ("mlx_server", "usage") if name in chunk}
        for choice in chunk["choices"]:
            rest["finish_reason"] = choice["finish_reason"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    _fold_call(message.setdefault(name, []), value[0])
                else:
                    message[name] = message.get(name, "") + value
    return {"message": message, **rest}


def _fold_call(calls: list[Wire], piece: Wire) -> None:
    if piece["index"] == len(calls):
        calls.append(piece)
    else:
        calls[-1]["function"]["arguments"] += piece["function"]["arguments"]


def kept(found: Wire) -> Wire:
    """The form in which it is recorded."""
    return {**found, "read": shown(found["read"])}


def recorded() -> dict[str, Wire]:
    found: dict[str, Wire] = json.loads(FILE.read_text("utf-8"))
    return found


def main() -> None:
    made = ((name, of_installed_package(each)) for name, each in EXCHANGES.items())
    lines = (f"{json.dumps(name)}: {json.dumps(kept(found))}" for name, found in made)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
