"""Compares the models of two servers over HTTP: `mlx-server compare URL URL`.

The first server answers, and both say how likely they find each token of its answers, by `echo` and
`logprobs` of /v1/completions. Only the likeliest tokens are sent, so the divergence is that of the
tokens that both servers name and of all others together, which is at most that of all tokens.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

import httpx

from mlx_server import limits
from mlx_server.clients.chat import UNREADABLE, client_of, error_in, first_model, key_at_home
from mlx_server.engine.comparison import Answers, Divergence, Finding
from mlx_server.errors import ComparisonFailed, Unauthorized
from mlx_server.json_bounds import json_or_none

Body = Mapping[str, Any]
"""Of a chat completion: `messages`, and `tools` if there are any."""

LEAST = 1e-12
GREEDY = {"temperature": 0}

KEY = re.compile(r"(?<=://)[^/@]*(?=@)")

T = TypeVar("T")


def without_key(named: str) -> str:
    """What may be shown of a server's name."""
    return KEY.sub("", named).replace("://@", "://")


@dataclass(frozen=True)
class ExpectedToken:
    """What a server expected at one token."""

    logprob: float
    tops: Mapping[str, float]
    """The log probabilities of the likeliest tokens, by their texts."""

    @property
    def likeliest(self) -> str:
        return max(self.tops, key=lambda token: self.tops[token])


class ServedModel:
    def __init__(self, named: str) -> None:
        """named: URL, or URL#MODEL; the URL may have a key, as in http://KEY@host."""
        url, _, model = named.partition("#")
        self._name = without_key(url)
        key = unquote(found[0]) if (found := KEY.search(url)) else key_at_home(url)
        self._client = client_of(self._name, key)
        try:
            self._model = model or first_model(self._client)
        except Unauthorized:
            raise Unauthorized(
                f"{self._name} needs a key: give it as in http://KEY@host."
            ) from None

    def prompt(self, body: Body) -> list[int]:
        return self._post("/tokenize", body, _tokens)

    def tokens(self, text: str) -> list[int]:
        return self._post("/tokenize", {"prompt": text, "add_special_tokens": False}, _tokens)

    def answer(self, prompt: Sequence[int], tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": tokens, "skip_special_tokens": False, **GREEDY}
        return self._post("/v1/completions", body, lambda given: str(given["choices"][0]["text"]))

    def message(self, body: Body, tokens: int, read: Callable[[Any], T]) -> T:
        """Returns what `read` makes of a chat completion."""
        return self._post("/v1/chat/completions", {**body, "max_tokens": tokens, **GREEDY}, read)

    def expected(self, tokens: Sequence[int], begin: int) -> list[ExpectedToken]:
        """Returns what was expected of the tokens from `begin` on."""
        body = {"prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": limits.TOP_LOGPROBS}

        def read(given: Any) -> list[ExpectedToken]:
            scored = given["choices"][0].get("logprobs") or {}
            logprobs, tops = scored.get("token_logprobs"), scored.get("top_logprobs")
            if not logprobs or not tops or not len(logprobs) == len(tops) == len(tokens):
                raise self._failed("it gives no log probabilities of the prompt's tokens")
            return [*map(_likely, logprobs[begin:], tops[begin:])]

        return self._post("/v1/completions", {**body, **GREEDY}, read)

    def nbytes(self) -> int:
        """0 if the server does not say it to this client."""
        with suppress(httpx.HTTPError, *UNREADABLE):
            pool = json_or_none(self._client.get("/v1/pool").content)
            of = {each["id"]: each["bytes"] for each in pool["models"]}
            return int(of.get(self._model.partition(":")[0], 0))
        return 0

    def _post(self, path: str, body: Body, read: Callable[[Any], T]) -> T:
        try:
            response = self._client.post(path, json={"model": self._model, **body})
        except httpx.HTTPError as error:
            raise self._failed(str(error)) from error
        given = json_or_none(response.content)
        if not response.is_success:
            why = error_in(given).get("message", "")
            raise self._failed(f"{path} answers with {response.status_code}. {why}")
        try:
            return read(given)
        except UNREADABLE as error:
            raise self._failed(f"what {path} answers can't be read ({error!r})") from error

    def _failed(self, why: str) -> ComparisonFailed:
        return ComparisonFailed(
            f"{self._name} can't be compared: {why.rstrip('.')}. A server is compared by /tokenize "
            "and by `echo` with `logprobs` of /v1/completions, as this server has them."
        )


def _tokens(given: Any) -> list[int]:
    return [*map(int, given["tokens"])]


def _likely(logprob: Any, tops: Any) -> ExpectedToken:
    likely = ExpectedToken(float(logprob), {token: float(tops[token]) for token in tops})
    if not tops or not all(map(math.isfinite, (likely.logprob, *likely.tops.values()))):
        raise ValueError("a log probability is no number")
    return likely


def served_findings(
    sides: Sequence[ServedModel], asked: Sequence[Body], tokens: int
) -> Iterator[Finding]:
    """Raises ComparisonFailed."""
    first, second = sides
    forced = list[tuple[list[int], int]]()
    began = time.perf_counter()
    for body in asked:
        prompt = first.prompt(body)
        text = first.answer(prompt, tokens)
        answer = first.tokens(text)
        if second.tokens(text) != answer:
            raise ComparisonFailed("The servers' models have different vocabularies.")
        forced.append(([*prompt, *answer], len(prompt)))
    found = list[list[list[ExpectedToken]]]()
    for side in (first, second):
        found.append([side.expected(*each) for each in forced])
        answers = [each[begin:] for each, begin in forced]
        logprobs = [[token.logprob for token in each] for each in found[-1]]
        seconds = time.perf_counter() - began
        yield Answers(answers, logprobs, 0.0, seconds, side.nbytes())
        began = time.perf_counter()
    for ours, theirs in zip(*found, strict=True):
        pairs = [*zip(ours, theirs, strict=True)]
        kl = [_divergence(a.tops, b.tops) for a, b in pairs]
        yield Divergence(kl, [a.likeliest == b.likeliest for a, b in pairs])


def _divergence(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """Of two distributions: the tokens that both have, and the rest."""
    shared = ours.keys() & theirs
    both = [(_probability(ours[token]), _probability(theirs[token])) for token in shared]
    rest = [max(LEAST, 1 - sum(each)) for each in zip(*both, strict=True)] or [1.0, 1.0]
    both.append((rest[0], rest[1]))
    return max(0.0, sum(p * math.log(p / q) for p, q in both))


def _probability(logprob: float) -> float:
    """Servers say -9999 of what can't follow."""
    return max(LEAST, math.exp(min(0.0, logprob)))
