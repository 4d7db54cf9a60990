"""A load generator for servers of the OpenAI API: N clients send requests at once.

During a run the received bytes are only kept with their times, and parsed when the run is over: the
client must take next to no CPU time from the server that it measures.
"""

import asyncio
import json
import math
import secrets
import ssl
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from time import perf_counter
from typing import Literal

import h11
import httpx
import numpy as np
from rich.console import Console

from mlx_server.clients.chat import client_of, first_model, parsed_chunk
from mlx_server.errors import GenerationFailed, ServerError, SettingsError
from mlx_server.events import tokens_per_pass
from mlx_server.json_bounds import json_or_none
from mlx_server.upstream.pieces import AnswerPiece, UpstreamUsage, read_piece
from mlx_server.upstream.responses import END, SseReader

TEXT = (
    "time way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number "
    "night point home water room mother area money story fact month lot right study book eye job "
    "word business issue side kind head house service friend father power hour game line end "
    "member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change"
)
WORDS = tuple(TEXT.split())
"""Words for prompts, each of which most tokenizers encode as one token."""

OWN_WORDS = 8
"""The number of words at the end of a prompt that it does not share with others."""


@dataclass(frozen=True)
class Workload:
    """The requests of one run. Each client sends the next one as soon as its answer is complete,
    until `requests` have been sent."""

    clients: int
    requests: int
    words: int
    """The length of each prompt, in words."""
    max_tokens: int
    shared_prefix: bool = False
    """Whether all prompts begin with the same words."""
    seed: str = ""
    """Prompts are drawn from it. A seed that was not used before makes prompts that are in no
    prompt cache."""

    def prompts(self) -> list[str]:
        return [self.prompt(number) for number in range(self.requests)]

    def prompt(self, number: int) -> str:
        own = min(OWN_WORDS, self.words // 2) if self.shared_prefix else self.words
        shared = _words(self.seed, self.words - own)
        return " ".join([*shared, *_words(f"{self.seed} {number}", own)])


def _words(seed: str, count: int) -> list[str]:
    return Random(seed).choices(WORDS, k=count)  # noqa: S311  nothing secret


@dataclass(frozen=True)
class Spread:
    mean: float
    median: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        measured = list(values) or [math.nan]
        return cls(statistics.fmean(measured), *np.percentile(measured, (50, 95)).tolist())


@dataclass(frozen=True)
class RequestTiming:
    """When the text of one answer arrived, in seconds, and its usage."""

    first_token: float
    """The time from opening the connection to the first chunk of text."""
    gaps: tuple[float, ...]
    """The times between consecutive chunks of text."""
    tokens: int
    """The completion tokens, or the number of chunks if the server reports no usage."""
    prompt_tokens: int | None = None
    accepted: int = 0
    """The tokens that had no pass of their own, as far as the server says so."""


@dataclass(frozen=True)
class Result:
    workload: Workload
    seconds: float
    answers: tuple[RequestTiming, ...]
    errors: tuple[str, ...] = ()

    @property
    def first_token(self) -> Spread:
        return Spread.of(answer.first_token for answer in self.answers)

    @property
    def gap(self) -> Spread:
        return Spread.of(gap for answer in self.answers for gap in answer.gaps)

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        tokens = sum(answer.tokens for answer in self.answers)
        accepted = sum(answer.accepted for answer in self.answers)
        return tokens_per_pass(tokens, accepted) or math.nan

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the median prompt; None if the server reports no usage."""
        counts = [a.prompt_tokens for a in self.answers if a.prompt_tokens is not None]
        return statistics.median_low(counts) if counts else None


ANSWER_SECONDS = 900.0

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Target:
    url: str
    """The base URL, with or without `/v1` at the end."""
    model: str
    key: str | None = None
    api: Api = "chat"


class Exchange:
    """One request and its answer: `run` records the bytes, `answer` parses them."""

    def __init__(self, target: Target, prompt: str, max_tokens: int) -> None:
        self._url = httpx.URL(target.url.rstrip("/").removesuffix("/v1") + PATHS[target.api])
        self._tls = _tls() if self._url.scheme == "https" else None
        self._http = h11.Connection(h11.CLIENT)
        self._request = self._request_bytes(target, _body(target, prompt, max_tokens))
        self._began = 0.0
        self._received: list[tuple[float, bytes]] = []
        self._error = ""

    def _request_bytes(self, target: Target, body: bytes) -> bytes:
        headers = {
            "Host": self._url.netloc.decode(),
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",  # the answer's end is seen without parsing during the run
            **({"Authorization": f"Bearer {target.key}"} if target.key else {}),
        }
        head = h11.Request(method="POST", target=self._url.raw_path, headers=list(headers.items()))
        parts = (head, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(self._http.send(part) or b"" for part in parts)

    async def run(self) -> None:
        self._began = perf_counter()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._run()
        except TimeoutError:
            self._error = f"no end after {ANSWER_SECONDS:g} s"
        except OSError as error:
            self._error = str(error)

    async def _run(self) -> None:
        transport, recorder = await asyncio.get_running_loop().create_connection(
            lambda: _Recorder(self._received),
            self._url.host,
            self._url.port or (443 if self._tls else 80),
            ssl=self._tls,
        )
        try:
            transport.write(self._request)
            self._error = str(await recorder.ended or "")
        finally:
            transport.abort()

    def answer(self) -> RequestTiming:
        """Parses what `run` received. Raises GenerationFailed for an answer that is not complete
        or has no text."""
        times: list[float] = []
        usage = UpstreamUsage()
        for time, piece in self._pieces():
            usage = piece.usage or usage
            if piece.text or piece.reasoning:
                times.append(time)
        if not times:
            raise GenerationFailed("The answer has no text.")
        return RequestTiming(
            first_token=times[0] - self._began,
            gaps=tuple(after - before for before, after in pairwise(times)),
            tokens=usage.completion or len(times),
            prompt_tokens=usage.prompt,
            accepted=usage.accepted,
        )

    def times(self) -> list[float]:
        """The time at which each chunk of text arrived, by `perf_counter`. An incomplete answer
        gives the times of the chunks that arrived."""
        times = []
        with suppress(ServerError):
            for time, piece in self._pieces():
                if piece.text or piece.reasoning:
                    times.append(time)
        return times

    def _pieces(self) -> Iterator[tuple[float, AnswerPiece]]:
        reader = SseReader()
        for time, received in self._content():
            for data in reader.feed(received):
                if data == END:
                    return
                yield time, read_piece(parsed_chunk(data))
        raise GenerationFailed("The answer was cut off.")

    def _content(self) -> Iterator[tuple[float, bytes]]:
        events = self._http_events()
        for time, event in events:
            match event:
                case h11.Response(status_code=status) if status != 200:
                    body = b"".join(bytes(e.data) for _, e in events if isinstance(e, h11.Data))
                    raise _refused(status, body)
                case h11.Data(data=data):
                    yield time, bytes(data)

    def _http_events(self) -> Iterator[tuple[float, h11.Event]]:
        try:
            for time, received in [*self._received, (perf_counter(), b"")]:
                self._http.receive_data(received)
                while isinstance(event := self._http.next_event(), h11.Event):
                    if isinstance(event, h11.EndOfMessage):
                        return
                    yield time, event
        except h11.RemoteProtocolError as error:
            raise GenerationFailed(f"The connection broke: {self._error or error}") from error


class _Recorder(asyncio.Protocol):
    def __init__(self, received: list[tuple[float, bytes]]) -> None:
        self._received = received
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._received.append((perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(exc)


def _body(target: Target, prompt: str, max_tokens: int) -> bytes:
    # An instruct model would soon end its answer to a mere list of words.
    question = {"role": "user", "content": f"{prompt}. Tell a long story with all these words."}
    prompt_field = {"messages": [question]} if target.api == "chat" else {"prompt": prompt}
    body = {
        "model": target.model,
        **prompt_field,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()  # also of half surrogate pairs, which msgspec refuses


def _refused(status: int, body: bytes) -> GenerationFailed:
    try:
        return GenerationFailed(f"HTTP {status}: {json_or_none(body)['error']['message']}")
    except (TypeError, KeyError):
        return GenerationFailed(f"HTTP {status}, without an error in the format of OpenAI's API")


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


COLUMNS = (
    "clients",
    "prompt",
    "TTFT, ms",
    "p95",
    "ITL, ms",
    "p95",
    "tokens/s",
    "tok/pass",
    "failed",
)
"""The column titles: a row fits 80 columns. A time is the median over all requests, except in a
`p95` column, which has the 95th percentile of the column to its left."""


def report(results: Iterable[Result], console: Console) -> bool:
    """Prints a line for each result as soon as it is measured. Returns False if any request
    failed."""
    errors = Counter[str]()
    for number, result in enumerate(results):
        for cells in [COLUMNS, _row(result)] if number == 0 else [_row(result)]:
            wide = zip(cells, COLUMNS, strict=True)
            line = "  ".join(cell.rjust(max(6, len(name))) for cell, name in wide)
            console.out(line, highlight=False)
        errors.update(result.errors)
    for error, count in errors.most_common():
        printable = "".join(filter(str.isprintable, error))  # a server may send anything
        console.out(f"{count} failed: {printable}", highlight=False)
    return not errors


def _row(result: Result) -> list[str]:
    first, gap = result.first_token, result.gap
    times = [first.median, first.p95, gap.median, gap.p95]
    return [
        str(result.workload.clients),
        "?" if result.prompt_tokens is None else str(result.prompt_tokens),
        *map(milliseconds, times),
        f"{result.tokens_per_second:.1f}",
        "-" if math.isnan(result.tokens_per_pass) else f"{result.tokens_per_pass:.2f}",
        f"{len(result.errors)}/{result.workload.requests}",
    ]


def milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.1f}"


def measure(
    target: Target,
    clients: Sequence[int],
    prompt_tokens: Sequence[int],
    max_tokens: int,
    requests: int | None = None,
    *,
    shared_prefix: bool = False,
) -> Iterator[Result]:
    """Yields one result for each prompt length and number of clients.

    requests: how many are sent for each result; by default two per client, but at least four.
    Raises GenerationFailed if the server does not answer at all.
    """
    seed = secrets.token_hex(8)
    for words in asyncio.run(words_for(target, prompt_tokens)):
        for count in clients:
            total = requests or max(4, 2 * count)
            load = Workload(
                count, total, words, max_tokens, shared_prefix, f"{seed} {words} {count}"
            )
            asyncio.run(warm_up(target, load))
            yield asyncio.run(run(target, load))


def target_of(url: str, key: str | None, model: str | None, api: Api) -> Target:
    """The server at `url` with the model to measure, by default the first that it lists.

    Raises ServerError if no server answers or it lists no models.
    """
    with client_of(url, key) as client:
        return Target(url, model or first_model(client), key, api)


async def run(target: Target, load: Workload) -> Result:
    exchanges = [Exchange(target, prompt, load.max_tokens) for prompt in load.prompts()]
    waiting = iter(exchanges)

    async def client() -> None:
        for exchange in waiting:
            await exchange.run()

    began = perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(load.clients):
            clients.create_task(client())
    seconds = perf_counter() - began
    answers, errors = [], []
    for exchange in exchanges:
        try:
            answers.append(exchange.answer())
        except ServerError as error:
            errors.append(error.message)
    return Result(load, seconds, tuple(answers), tuple(errors))


async def warm_up(target: Target, load: Workload) -> None:
    """Sends one short request for each client of `load`, all at once, then one that puts the shared
    prefix into the server's prompt cache if the prompts have one."""
    words, seed = min(load.words, 16), f"{load.seed} warm-up"
    await run(target, Workload(load.clients, load.clients, words, max_tokens=4, seed=seed))
    if load.shared_prefix:
        await Exchange(target, load.prompt(-1), max_tokens=4).run()


async def words_for(target: Target, tokens: Sequence[int]) -> list[int]:
    """For each number of prompt tokens, the number of words that make a prompt of that length,
    with what the server's chat template adds.

    Two probes measure the tokens per word. A server that reports no usage gets one word per token.
    Raises GenerationFailed if the server does not answer.
    """
    few, many = 16, 256

    async def counted(words: int) -> int | None:
        probe = Exchange(target, Workload(1, 1, words, max_tokens=8).prompt(0), max_tokens=8)
        await probe.run()
        return probe.answer().prompt_tokens

    of_few, of_many = await counted(few), await counted(many)
    if of_few is None or of_many is None or of_many <= of_few:
        return list(tokens)
    per_word = (of_many - of_few) / (many - few)
    return [max(1, round(few + (count - of_few) / per_word)) for count in tokens]


def numbers(flag: str, value: str, most: int) -> list[int]:
    """Parses a flag's comma-separated list of integers from 1 to `most`.

    Raises SettingsError, which names the flag, for any other value.
    """
    try:
        parsed = [int(part) for part in value.split(",")]
    except ValueError:
        parsed = []
    if not parsed or min(parsed) < 1 or max(parsed) > most:
        what = f"should be a list like 1,4,16 of numbers up to {most}"
        raise SettingsError(f"{flag} {what}, not {value[:100]!r}.")
    return parsed
