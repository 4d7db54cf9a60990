"""What a server of the OpenAI API does while N clients ask at once.

During a run what the server sends is only kept, with the time it came at, and read when the run is
over: the client must take next to nothing of the machine that it measures.
"""

import asyncio
import math
import secrets
import ssl
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from time import perf_counter
from typing import Any, Literal

import h11
import httpx
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from mlx_server.chat import client_of, served_models
from mlx_server.errors import BadRequest, GenerationFailed, SettingsError

TEXT = (
    "time way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number "
    "night point home water room mother area money story fact month lot right study book eye job "
    "word business issue side kind head house service friend father power hour game line end "
    "member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change"
)
WORDS = tuple(TEXT.split())
"""Each is one token to most tokenizers."""

OWN_WORDS = 8
"""At the end of prompts that share their beginning."""

ANSWER_SECONDS = 900.0

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Target:
    url: str
    """With or without OpenAI's `/v1` at its end."""
    model: str
    key: str | None = None
    api: Api = "chat"


@dataclass(frozen=True)
class Load:
    """Each of the clients asks again when it has its answer, until all requests are made."""

    clients: int
    requests: int
    words: int
    """Of a prompt."""
    max_tokens: int
    shared_prefix: bool = False
    """All prompts begin alike; else each begins with words of its own."""
    seed: str = ""
    """Another one gives other prompts, which no cache has seen."""

    def prompts(self) -> list[str]:
        return [self.prompt(number) for number in range(self.requests)]

    def prompt(self, number: int) -> str:
        own = min(OWN_WORDS, self.words // 2) if self.shared_prefix else self.words
        shared = _words(self.seed, self.words - own)
        return " ".join([*shared, *_words(f"{self.seed} {number}", own)])


def _words(seed: str, count: int) -> list[str]:
    return Random(seed).choices(WORDS, k=count)  # noqa: S311  nothing secret


@dataclass(frozen=True)
class Answer:
    """Times in seconds."""

    first_token: float
    """From the request, connecting included, to the first text."""
    gaps: tuple[float, ...]
    """Between one piece of text and the next."""
    tokens: int
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Spread:
    mean: float
    median: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        found = sorted(values)
        if not found:
            return cls(math.nan, math.nan, math.nan)
        return cls(statistics.fmean(found), percentile(found, 50), percentile(found, 95))


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Between two values where it falls between them."""
    place = (len(ascending) - 1) * percent / 100
    below, above = ascending[math.floor(place)], ascending[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


@dataclass(frozen=True)
class Result:
    load: Load
    seconds: float
    answers: tuple[Answer, ...]
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
    def prompt_tokens(self) -> int | None:
        """Of the median prompt, if the server counts them."""
        counts = [a.prompt_tokens for a in self.answers if a.prompt_tokens is not None]
        return statistics.median_low(counts) if counts else None


def measure(
    target: Target,
    clients: Sequence[int],
    prompt_tokens: Sequence[int],
    max_tokens: int,
    requests: int | None = None,
    *,
    shared_prefix: bool = False,
) -> Iterator[Result]:
    """One result for each length of prompt and number of clients.

    Raises GenerationFailed if the server does not answer at all.
    """
    seed = secrets.token_hex(8)
    for words in asyncio.run(words_for(target, prompt_tokens)):
        for count in clients:
            asked = requests or max(4, 2 * count)
            load = Load(count, asked, words, max_tokens, shared_prefix, f"{seed} {words} {count}")
            asyncio.run(warm_up(target, load))
            yield asyncio.run(run(target, load))


def target_of(url: str, key: str | None, model: str | None, api: Api) -> Target:
    """Raises ServerError if there is no such server, or it serves nothing."""
    with client_of(url, key) as client:
        served = [model] if model else served_models(client)
    if not served:
        raise BadRequest("The server lists no models. Name one with --model.")
    return Target(url, served[0], key, api)


async def run(target: Target, load: Load) -> Result:
    exchanges = [Exchange(target, prompt, load.max_tokens) for prompt in load.prompts()]
    waiting = iter(exchanges)

    async def client() -> None:
        for exchange in waiting:
            await exchange.run()

    began = perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(load.clients):
            clients.create_task(client())
    return _result(load, perf_counter() - began, exchanges)


def _result(load: Load, seconds: float, exchanges: Iterable["Exchange"]) -> Result:
    answers, errors = [], []
    for exchange in exchanges:
        try:
            answers.append(exchange.answer())
        except GenerationFailed as error:
            errors.append(error.message)
    return Result(load, seconds, tuple(answers), tuple(errors))


async def warm_up(target: Target, load: Load) -> None:
    """As many clients as will come, shortly; then the prefix, if the prompts share one."""
    words, seed = min(load.words, 16), f"{load.seed} warm-up"
    await run(target, Load(load.clients, load.clients, words, max_tokens=4, seed=seed))
    if load.shared_prefix:
        await Exchange(target, load.prompt(-1), max_tokens=4).run()


async def words_for(target: Target, tokens: Sequence[int]) -> list[int]:
    """How many words make prompts of so many tokens, as the server counts, its template included.

    Raises GenerationFailed if it gives no answer. One that does not count gets a word a token.
    """
    few, many = 16, 256

    async def counted(words: int) -> int | None:
        probe = Exchange(target, Load(1, 1, words, max_tokens=8).prompt(0), max_tokens=8)
        await probe.run()
        return probe.answer().prompt_tokens

    of_few, of_many = await counted(few), await counted(many)
    if of_few is None or of_many is None or of_many <= of_few:
        return list(tokens)
    per_word = (of_many - of_few) / (many - few)
    return [max(1, round(few + (count - of_few) / per_word)) for count in tokens]


class Exchange:
    """One request, and what came back when."""

    def __init__(self, target: Target, prompt: str, max_tokens: int) -> None:
        self._url = httpx.URL(target.url.rstrip("/").removesuffix("/v1") + PATHS[target.api])
        self._tls = _tls() if self._url.scheme == "https" else None
        self._http = h11.Connection(h11.CLIENT)
        self._request = self._written(target, _body(target, prompt, max_tokens))
        self._began = 0.0
        self._received: list[tuple[float, bytes]] = []
        self._error = ""

    def _written(self, target: Target, body: bytes) -> bytes:
        headers = {
            "Host": self._url.netloc.decode(),
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",  # so the end of the answer needs no reading to be seen
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

    def answer(self) -> Answer:
        """Raises GenerationFailed for whatever is no whole answer."""
        times: list[float] = []
        usage = Usage()
        for time, chunk in self._chunks():
            usage = chunk.usage or usage
            if any(choice.has_text for choice in chunk.choices or ()):
                times.append(time)
        if not times:
            raise GenerationFailed("An answer without text.")
        return Answer(
            first_token=times[0] - self._began,
            gaps=tuple(after - before for before, after in pairwise(times)),
            tokens=usage.completion_tokens or len(times),
            prompt_tokens=usage.prompt_tokens,
        )

    def _chunks(self) -> Iterator[tuple[float, "Chunk"]]:
        for time, data in _events(self._content()):
            if data == b"[DONE]":
                return
            chunk = _chunk(data)
            if chunk.error:
                raise GenerationFailed(chunk.refusal)
            yield time, chunk
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
    asked = {"messages": [question]} if target.api == "chat" else {"prompt": prompt}
    body = {
        "model": target.model,
        **asked,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(body)


def _events(content: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, each with the time at which its line was whole."""
    rest = b""
    for time, piece in content:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            name, _, data = line.partition(b":")
            if name == b"data":
                yield time, data.strip()


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta or Delta()
        return any((self.text, delta.content, delta.reasoning_content, delta.reasoning))


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None

    @property
    def refusal(self) -> str:
        return str(self.error.get("message") if isinstance(self.error, dict) else self.error)


def _chunk(data: bytes) -> Chunk:
    try:
        return msgspec.json.decode(data, type=Chunk)
    except msgspec.DecodeError as error:
        raise GenerationFailed("What came is not in the format of the OpenAI API.") from error


def _refused(status: int, body: bytes) -> GenerationFailed:
    try:
        return GenerationFailed(f"HTTP {status}: {_chunk(body).refusal}")
    except GenerationFailed:
        return GenerationFailed(f"HTTP {status}, and no error in the format of the OpenAI API")


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


COLUMNS = (
    "clients",
    "prompt tokens",
    "first token, ms",
    "p95",
    "next token, ms",
    "p95",
    "tokens/s",
    "failed",
)
"""Times are medians unless they say p95."""


def report(results: Iterable[Result], console: Console) -> bool:
    """Shows each as it comes, in a table, or in lines to a pipe. Whether no request failed."""
    show = _table if console.is_terminal else _lines
    errors = Counter(error for result in show(results, console) for error in result.errors)
    for error, count in errors.most_common():
        printable = "".join(filter(str.isprintable, error))  # a server may send anything
        console.out(f"{count} failed: {printable}", highlight=False)
    return not errors


def _table(results: Iterable[Result], console: Console) -> list[Result]:
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="right")
    done: list[Result] = []
    with Live(table, console=console):
        for result in results:
            table.add_row(*_row(result))
            done.append(result)
    return done


def _lines(results: Iterable[Result], console: Console) -> list[Result]:
    def line(cells: Iterable[str]) -> str:
        wide = zip(cells, COLUMNS, strict=True)
        return "  ".join(cell.rjust(max(8, len(name))) for cell, name in wide)

    done: list[Result] = []
    for result in results:
        if not done:
            console.out(line(COLUMNS), highlight=False)
        console.out(line(_row(result)), highlight=False)
        done.append(result)
    return done


def _row(result: Result) -> list[str]:
    first, gap = result.first_token, result.gap
    times = [first.median, first.p95, gap.median, gap.p95]
    return [
        str(result.load.clients),
        "?" if result.prompt_tokens is None else str(result.prompt_tokens),
        *map(milliseconds, times),
        f"{result.tokens_per_second:.1f}",
        f"{len(result.errors)}/{result.load.requests}",
    ]


def milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.1f}"


def numbers(flag: str, value: str) -> list[int]:
    """A comma-separated list; raises SettingsError if it is none."""
    try:
        found = [int(part) for part in value.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SettingsError(f"{flag} is a list like 1,4,16, not {value!r}.")
    return found
