"""Factual questions whose answers have a schema: are the values right, and not only the form?"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.live.server import DEMO_MODEL, LiveServer

MODELS: dict[str, dict[str, Any]] = {"described": DEMO_MODEL}
"""The demo model, with the schema in its prompt."""

Values = Mapping[str, str | int]


@dataclass(frozen=True)
class Fact:
    question: str
    values: Values

    def body(self, model: str) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": {name: _type(value) for name, value in self.values.items()},
            "required": [*self.values],
            "additionalProperties": False,
        }
        wanted = {"name": "answer", "schema": schema, "strict": True}
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.question}],
            "temperature": 0,
            "max_tokens": 100,
            "response_format": {"type": "json_schema", "json_schema": wanted},
        }

    def right(self, text: str) -> bool:
        try:
            found = json.loads(text)
        except ValueError:  # it was cut
            return False
        return all(_alike(found[name], value) for name, value in self.values.items())


def _type(value: str | int) -> dict[str, str]:
    return {"type": "string" if isinstance(value, str) else "integer"}


def _alike(found: str | int, wanted: str | int) -> bool:
    if isinstance(wanted, int):
        return found == wanted
    return str(found).strip().strip(".").casefold() == wanted.casefold()


LINES = Path(__file__).with_suffix(".jsonl").read_text("utf-8").splitlines()
FACTS = tuple(Fact(**json.loads(line)) for line in LINES)


@dataclass(frozen=True)
class FactAnswer:
    fact: Fact
    text: str
    tokens: int

    @property
    def is_right(self) -> bool:
        return self.fact.right(self.text)


async def answers(server: LiveServer, model: str, together: int) -> list[FactAnswer]:
    places = asyncio.Semaphore(together)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=None) as http:

        async def one(fact: Fact) -> FactAnswer:
            async with places:
                response = await http.post("/v1/chat/completions", json=fact.body(model))
            response.raise_for_status()
            completion = response.json()
            text = completion["choices"][0]["message"]["content"]
            return FactAnswer(fact, text, completion["usage"]["completion_tokens"])

        return await asyncio.gather(*map(one, FACTS))
