"""Requests of random shapes, always the same ones to the same seeds."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx

NEW = "/v1/responses"
CHAT = "/v1/chat/completions"
CONVERSATIONS = "/v1/conversations"
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "said", "it", "would", "never", "rain")
TOOL = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class UnexpectedStatus(Exception):
    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(f"{answer.status_code} {answer.text}")
        self.status = answer.status_code


class Client:
    """Of a server with the models a and b, and with the adapters x and y of a."""

    def __init__(self, http: httpx.Client, seed: int) -> None:
        self._http = http
        self._random = random.Random(seed)
        self._shapes: tuple[Callable[[], None], ...] = (
            self.chat,
            self.stream,
            self.cut,
            self.completion,
            self.response,
            self.conversation,
            self.schema,
            self.tool,
            self.adapter,
            self.wrong,
            self.damaged,
            self.unknown,
        )

    def send(self) -> None:
        self._random.choice(self._shapes)()

    def chat(self) -> None:
        n = self._random.choice((1, 1, 2, 5))
        self._post(CHAT, self._asked(n=n, logprobs=n == 2), 200)

    def chat_with(self, model: str) -> None:
        self._post(CHAT, self._asked(model=model), 200)

    def stream(self) -> None:
        for _ in self._lines(self._asked(stream=True)):
            pass

    def cut(self) -> None:
        next(self._lines(self._asked(stream=True, max_tokens=100)))

    def completion(self) -> None:
        asked = {"model": self._model(), "prompt": self._text(), "max_tokens": 3}
        self._post("/v1/completions", {**asked, "echo": True, "logprobs": 2}, 200)

    def response(self) -> None:
        asked = {"model": "a", "input": self._text(), "max_output_tokens": 4, "store": True}
        first = self._post(NEW, asked, 200).json()["id"]
        self._post(NEW, {**asked, "previous_response_id": first}, 200)
        self._http.get(f"{NEW}/{first}")
        if self._random.random() < 0.3:
            self._http.delete(f"{NEW}/{first}")

    def conversation(self) -> None:
        made = self._post(CONVERSATIONS, {"metadata": {"about": self._text()[:500]}}, 200)
        asked = {"model": "a", "input": "Hi", "max_output_tokens": 2}
        self._post(NEW, {**asked, "conversation": made.json()["id"]}, 200)

    def schema(self) -> None:
        """One that no request has named before."""
        name = f"p{self._random.randrange(10**9)}"
        schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        named = {"name": "s", "schema": {**schema, "additionalProperties": False}, "strict": True}
        self._post(
            CHAT, self._asked(response_format={"type": "json_schema", "json_schema": named}), 200
        )

    def tool(self) -> None:
        name = f"f{self._random.randrange(10**9)}"
        tools = [{"type": "function", "function": {"name": name, "parameters": TOOL}}]
        self._post(CHAT, self._asked(tools=tools, tool_choice="required", max_tokens=30), 200)

    def adapter(self) -> None:
        self._post(CHAT, self._asked(model="a", adapter=self._random.choice(("x", "y"))), 200)

    def wrong(self) -> None:
        self._post(CHAT, self._asked(temperature=-self._random.random() - 1), 400)

    def damaged(self) -> None:
        half = json.dumps(self._asked()).encode()[:-10]
        self._http.post(CHAT, content=half, headers={"content-type": "application/json"})

    def unknown(self) -> None:
        self._post(CHAT, self._asked(model=f"m{self._random.randrange(10**9)}"), 404)

    def _asked(self, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._text()}]
        return {"model": self._model(), "messages": messages, "max_tokens": 6, **more}

    def _model(self) -> str:
        return "b" if self._random.random() < 0.02 else "a"

    def _text(self) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.choice((2, 5, 20, 150))))

    def _post(self, path: str, body: Any, status: int) -> httpx.Response:
        answer = self._http.post(path, json=body)
        if answer.status_code != status:
            raise UnexpectedStatus(answer)
        return answer

    def _lines(self, body: Any) -> Iterator[str]:
        with self._http.stream("POST", CHAT, json=body) as answer:
            yield from answer.iter_lines()
