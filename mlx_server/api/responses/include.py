"""`include` of the routes that return stored items: what they have in addition."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec
from starlette.requests import Request

from mlx_server.api.responses.items import Seal, Wire
from mlx_server.api.responses.protocol import NOT_HERE, NotHere
from mlx_server.api.security import signer_of
from mlx_server.errors import BadRequest
from mlx_server.store import ItemRecord

NAME = re.compile(r"include(?:\[\d*\])?")
"""How clients spell the name of a list in a query."""

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
KNOWN = frozenset({ENCRYPTED, LOGPROBS, *get_args(NotHere)})


class Included:
    """The values of one request, and which of them its items turned out not to have."""

    def __init__(self, wanted: Iterable[str], seal: Seal) -> None:
        self._seal = seal
        self._wanted = list(dict.fromkeys(wanted))
        self._has_texts = self._has_logprobs = False

    def records(self, items: Sequence[ItemRecord]) -> list[Any]:
        if not self._wanted:
            return [msgspec.Raw(item.body) for item in items]
        return self.items(msgspec.json.decode(item.body, type=dict[str, Any]) for item in items)

    def items(self, items: Iterable[Wire]) -> list[Wire]:
        return [self._item(item) for item in items]

    def wanted(self) -> list[str]:
        return [f"include.{value}" for value in self._wanted]

    def ignored(self) -> list[str]:
        absent = set(NOT_HERE)
        if self._has_texts and not self._has_logprobs:
            absent.add(LOGPROBS)  # they were not computed
        return [name for name in self.wanted() if name.removeprefix("include.") in absent]

    def _item(self, item: Wire) -> Wire:
        match item:
            case {"type": "reasoning", "content": [*parts]} if ENCRYPTED in self._wanted:
                text = "".join(part["text"] for part in parts)
                return {"encrypted_content": self._seal(text), **item}
            case {"type": "message", "role": "assistant", "content": [*parts]}:
                texts = [part for part in parts if part["type"] == "output_text"]
                self._has_texts = self._has_texts or bool(texts)
                self._has_logprobs = self._has_logprobs or any(p.get("logprobs") for p in texts)
        return item


def included(http: Request) -> Included:
    """Raises BadRequest for a value that no route has."""
    values = [value for name, value in http.query_params.multi_items() if NAME.fullmatch(name)]
    for value in values:
        if value not in KNOWN:
            raise BadRequest(
                f"`include` should be one of {', '.join(sorted(KNOWN))}.", param="include"
            )
    return Included(values, signer_of(http).seal)
