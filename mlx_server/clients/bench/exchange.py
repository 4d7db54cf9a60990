"""One request of a bench, and the times at which its answer arrived."""

import asyncio
import json
import ssl
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal

import h11
import httpx
import msgspec

from mlx_server.errors import GenerationFailed

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
        usage = Usage()
        for time, chunk in self._chunks():
            usage = chunk.usage or usage
            if any(choice.has_text for choice in chunk.choices or ()):
                times.append(time)
        if not times:
            raise GenerationFailed("The answer has no text.")
        return RequestTiming(
            first_token=times[0] - self._began,
            gaps=tuple(after - before for before, after in pairwise(times)),
            tokens=usage.completion_tokens or len(times),
            prompt_tokens=usage.prompt_tokens,
        )

    def times(self) -> list[float]:
        """The time at which each chunk of text arrived, by `perf_counter`. An incomplete answer
        gives the times of the chunks that arrived."""
        times = []
        with suppress(GenerationFailed):
            for time, chunk in self._chunks():
                if any(choice.has_text for choice in chunk.choices or ()):
                    times.append(time)
        return times

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


def _events(content: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, each with the time at which its line was complete."""
    rest = b""
    for time, piece in content:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            name, _, data = line.partition(b":")
            if name == b"data":
                yield time, data.strip()


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: ChunkDelta | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta or ChunkDelta()
        return any((self.text, delta.content, delta.reasoning_content, delta.reasoning))


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    choices: list[ChunkChoice] | None = None
    usage: Usage | None = None
    error: Any = None

    @property
    def refusal(self) -> str:
        return str(self.error.get("message") if isinstance(self.error, dict) else self.error)


def _chunk(data: bytes) -> Chunk:
    try:
        return msgspec.json.decode(data, type=Chunk)
    except msgspec.DecodeError as error:
        raise GenerationFailed("The answer is not in the format of the OpenAI API.") from error


def _refused(status: int, body: bytes) -> GenerationFailed:
    try:
        return GenerationFailed(f"HTTP {status}: {_chunk(body).refusal}")
    except GenerationFailed:
        return GenerationFailed(f"HTTP {status}, without an error in the format of the OpenAI API")


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
