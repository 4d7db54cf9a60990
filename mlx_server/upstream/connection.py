"""Sends requests to one upstream, with what authenticates this server, and reads its responses; a
breaker stops what would only fail."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol, cast

import httpx2
import msgspec

from mlx_server import limits
from mlx_server.errors import (
    ServerError,
    UpstreamBusy,
    UpstreamFailed,
    UpstreamLoop,
    UpstreamTimeout,
)
from mlx_server.requests import HOPS_HEADER
from mlx_server.system.http_transport import BoundedTransport
from mlx_server.upstream.dialects import MODELS, LearntFacts, body_for, endpoint, facts_in
from mlx_server.upstream.failures import (
    RETRIED,
    Retriable,
    Unreachable,
    error_in,
    pause_before,
    refusal,
    reported,
    retry_after,
)
from mlx_server.upstream.request import UpstreamRequest
from mlx_server.upstream.responses import Allowance, json_values, limited, response_values
from mlx_server.upstream.spec import UpstreamSpec

FAILURES = 5
"""The number of failures in a row that opens the breaker."""

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 120.0
"""The first and the longest pause without a request, in seconds. The pause doubles with each probe
that fails."""

MOST_CLIENTS = 1024
"""The clients whose failures are counted; the one that failed first is forgotten."""


class CircuitBreaker:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._closed_at: float | None = None
        """The time from which a request is sent as a probe; None while the breaker is closed."""
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._closed_at is not None

    def seconds_left(self) -> float:
        """The seconds until a request may be sent; 0 if one may be sent now. While a probe runs it
        is always 1."""
        if self._closed_at is None:
            return 0.0
        left = max(0.0, self._closed_at - self._clock())
        return left if left or not self._probing else 1.0

    def begin(self) -> None:
        """Records that a request is sent, which is the probe if the breaker is open."""
        self._probing = self.is_open

    def abandoned(self) -> None:
        """Records that a request ended without a result, for example because its client left."""
        self._probing = False

    def succeeded(self) -> None:
        self._failures, self._pause, self._closed_at, self._probing = 0, FIRST_PAUSE, None, False

    def failed(self) -> None:
        self._failures += 1
        if self._probing:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if self._probing or (self._failures >= FAILURES and not self.is_open):
            self._closed_at = self._clock() + self._pause
        self._probing = False


class UpstreamBreaker:
    """The breakers of one upstream.

    That no connection can be made says something about the upstream, and counts for all clients.
    All other failures may be due to what a client has sent, and count for this client alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._connecting = CircuitBreaker(clock)
        self._failing: dict[str, CircuitBreaker] = {}
        """By client, for those whose last request failed."""
        self._has_answered = False
        """Whether the last request succeeded."""

    @property
    def is_open(self) -> bool:
        """Whether the upstream seems to be out of order for everybody."""
        failing = any(breaker.is_open for breaker in self._failing.values())
        return self._connecting.is_open or (failing and not self._has_answered)

    def seconds_left(self, client: str) -> float:
        return max(breaker.seconds_left() for breaker in self._of(client))

    def begin(self, client: str) -> None:
        for breaker in self._of(client):
            breaker.begin()

    def abandoned(self, client: str) -> None:
        for breaker in self._of(client):
            breaker.abandoned()

    def succeeded(self, client: str) -> None:
        self._connecting.succeeded()
        self._failing.pop(client, None)
        self._has_answered = True

    def failed(self, client: str) -> None:
        """Records that the upstream refused or lost a request."""
        self._connecting.succeeded()
        if client not in self._failing:
            self._failing[client] = CircuitBreaker(self._clock)
            if len(self._failing) > MOST_CLIENTS:
                del self._failing[next(iter(self._failing))]
        self._failing[client].failed()
        self._has_answered = False

    def unreachable(self, client: str) -> None:
        """Records that no connection was made."""
        self.abandoned(client)
        self._connecting.failed()

    def _of(self, client: str) -> list[CircuitBreaker]:
        own = self._failing.get(client)
        return [self._connecting, own] if own else [self._connecting]


GRANT = "urn:ibm:params:oauth:grant-type:apikey"

EARLY_SECONDS = 300.0
"""How long before its expiry a token is replaced. One with a short life is replaced in the last
fifth of it."""

Environ = Mapping[str, str]


class Credentials(Protocol):
    async def headers(self) -> Mapping[str, str]: ...

    def refused(self) -> bool:
        """Records that the upstream refused the headers. Returns whether `headers` can give new
        ones."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """The texts that must not appear in any message."""


class UpstreamKey:
    """The key of an environment variable, which is sent as a bearer token; without a variable
    nothing is sent."""

    def __init__(self, variable: str | None, environ: Environ = os.environ) -> None:
        self._variable = variable
        self._environ = environ

    async def headers(self) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self.key()}"} if self._variable else {}

    def refused(self) -> bool:
        return False

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self._environ.get(self._variable or "", ""),)

    def key(self) -> str:
        key = self._environ.get(self._variable or "", "").strip()
        if not key.isascii() or not key.isprintable() or not key:
            raise UpstreamFailed(
                f"The environment variable {self._variable} has no key for the upstream. Set it "
                "where the server is started."
            )
        return key


class IamToken:
    """An IBM Cloud token for a key. All requests share it, and it is replaced before it expires."""

    def __init__(
        self,
        key: UpstreamKey,
        url: str,
        client: Callable[[], httpx2.AsyncClient],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self._url = f"{url.rstrip('/')}/identity/token"
        self._client = client
        self._clock = clock
        self._token = ""
        self._renew_at = 0.0
        self._fetching = asyncio.Lock()

    async def headers(self) -> Mapping[str, str]:
        async with self._fetching:
            if not self._token or self._clock() >= self._renew_at:
                await self._fetch()
            return {"authorization": f"Bearer {self._token}"}

    def refused(self) -> bool:
        had_one, self._token = bool(self._token), ""
        return had_one

    @property
    def secrets(self) -> tuple[str, ...]:
        return (*self._key.secrets, self._token)

    async def _fetch(self) -> None:
        form = {"grant_type": GRANT, "apikey": self._key.key()}
        async with self._client().stream("POST", self._url, data=form) as response:
            body = await limited(response, limits.UPSTREAM_ERROR_BYTES)
        if response.status_code != 200:
            status = 401 if response.status_code in (400, 403, 413, 422) else response.status_code
            # its words are not shown, since they may quote the form with the key
            raise refusal("watsonx's identity service", status, b"")
        try:
            reply = msgspec.json.decode(body, type=_Token)
        except msgspec.MsgspecError:
            raise UpstreamFailed("watsonx's identity service sent no token.") from None
        lifetime = max(0.0, reply.expires_in)
        self._token = reply.access_token
        self._renew_at = self._clock() + max(0.8 * lifetime, lifetime - EARLY_SECONDS)


class _Token(msgspec.Struct):
    access_token: Annotated[str, msgspec.Meta(pattern=r"\A[!-~]+\Z")]  # it becomes a header
    expires_in: float


IAM_URL = "https://iam.cloud.ibm.com"
"""The server that issues tokens for watsonx."""

log = logging.getLogger("mlx_server.upstream")

USAGE_SECONDS = 2.0
"""How long the reader waits for the usage after an answer's end."""

MODEL_LIST_ATTEMPTS = 3
"""How often an upstream is asked for its models by itself if it does not respond."""

NOT_THERE = frozenset({502, 503, 504})
"""The statuses by which a proxy says that the upstream behind it does not respond."""

PROBE_SECONDS = 60.0
"""How long an upstream may be silent until one who looks at its state has it asked again."""


class UpstreamStream:
    """The JSON values of one response, the first of which has arrived already."""

    def __init__(
        self,
        connection: "UpstreamConnection",
        response: httpx2.Response,
        first: Any,
        rest: AsyncGenerator[Any],
        allowance: Allowance,
    ) -> None:
        self._connection, self._response, self._allowance = connection, response, allowance
        self._first, self._rest = first, rest
        self._progress: object = None
        self._idle_seconds = self._until = 0.0
        """The most seconds without progress, and when they end."""
        self._is_closed = False
        connection.running += 1

    async def next(self, progress: object, *, has_ended: bool) -> Any:
        """The next value; None at the end. Raises UpstreamTimeout if none adds to the answer in
        time, or if the answer takes too long in all. After the answer's end only the usage may
        follow, so a timeout, a lost connection or invalid data ends the values without an error.

        progress: differs from all before it if a piece has added to the answer. has_ended: whether
        the upstream has sent a finish reason."""
        clock, policy = time.monotonic, self._connection.spec.policy
        if progress != self._progress:
            self._progress = progress
            self._idle_seconds = USAGE_SECONDS if has_ended else policy.idle_seconds
            self._until = clock() + self._idle_seconds
        if self._first is not None:
            value, self._first = self._first, None
            return value
        seconds = min(self._until - clock(), self._allowance.seconds_left)
        try:
            if seconds <= 0:
                raise TimeoutError
            async with asyncio.timeout(seconds):
                value = await anext(self._rest, None)
            self._connection.check(value)
            return value
        except (httpx2.HTTPError, UpstreamFailed, TimeoutError) as error:
            if has_ended:
                return None
            if isinstance(error, UpstreamFailed):
                raise
            if isinstance(error, TimeoutError):
                raise self._timeout() from None
            raise UpstreamFailed(
                f"The upstream of {self._connection.id} lost the connection before the answer was "
                f"complete ({type(error).__name__})."
            ) from None

    def _timeout(self) -> UpstreamTimeout:
        id, most = self._connection.id, limits.UPSTREAM_ANSWER_SECONDS
        if self._allowance.seconds_left > 0:
            return UpstreamTimeout(
                f"The upstream of {id} added nothing to its answer for {self._idle_seconds:g} "
                "seconds."
            )
        return UpstreamTimeout(
            f"The upstream of {id} did not end its answer within {most:g} seconds."
        )

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._connection.running -= 1
            self._connection.last_used = time.time()
        await self._rest.aclose()
        await self._response.aclose()


class UpstreamConnection:
    def __init__(self, id: str, spec: UpstreamSpec) -> None:
        """id: the model's id on this server."""
        self.id = id
        self.spec = spec
        self.breaker = UpstreamBreaker()
        self.running = 0
        """The number of answers that are being read."""
        self.last_used: float | None = None
        """The Unix time at which the last answer ended."""
        self.last_error: str | None = None
        """The error of the last request; None if it was answered."""
        self.learnt = LearntFacts()
        self.capabilities = spec.capabilities
        """The capabilities that models.yaml sets, `/models` states or answers have shown."""
        self._learning: asyncio.Task[None] | None = None
        self._has_learnt = False
        self._attempts_to_learn = MODEL_LIST_ATTEMPTS
        self._responds: bool | None = None
        """Whether it responded when it was last asked for anything; None if it never was."""
        self._asked_at = time.monotonic()
        """When it last was asked for its models, or began an answer."""
        self._seen: Mapping[str, str] = {}
        """The capabilities that the upstream's answers have shown."""
        self._client: httpx2.AsyncClient | None = None
        self._credentials: Credentials = (key := UpstreamKey(spec.api_key_env))
        if spec.kind == "watsonx":
            self._credentials = IamToken(key, IAM_URL, self._http)

    async def aclose(self) -> None:
        learning, self._learning = self._learning, None
        if learning:
            learning.cancel()
            await asyncio.gather(learning, return_exceptions=True)
        client, self._client = self._client, None
        if client:
            await client.aclose()

    @property
    def state(self) -> Literal["unasked", "ready", "unavailable"]:
        if self.breaker.is_open or self._responds is False:
            return "unavailable"
        return "ready" if self._responds else "unasked"

    def probe_soon(self) -> None:
        """Finds out in a task whether the upstream still responds, if nothing came for a while."""
        if time.monotonic() - self._asked_at >= PROBE_SECONDS:
            self._ask_for_models()

    def learn_soon(self) -> None:
        """Asks the upstream for its models in a task, if it has not responded before. Requests do
        not wait for the task."""
        if self._attempts_to_learn and not self._has_learnt:
            self._attempts_to_learn -= 1
            self._ask_for_models()

    def _ask_for_models(self) -> None:
        running = self._learning and not self._learning.done()
        if self.spec.kind == "openai" and not running:
            self._asked_at = time.monotonic()
            self._learning = asyncio.create_task(self._learn(self._asked_at))

    async def _learn(self, began: float) -> None:
        try:
            async with asyncio.timeout(limits.UPSTREAM_CONNECT_SECONDS):
                headers = await self._credentials.headers()
                request = self._http().build_request(
                    "GET", endpoint(self.spec, MODELS), headers=headers
                )
                response = await self._http().send(request, stream=True)
                try:
                    is_there = response.status_code not in NOT_THERE
                    is_news = is_there and not self._has_learnt
                    body = await limited(response, limits.UPSTREAM_LINE_BYTES) if is_news else b""
                finally:
                    await response.aclose()
        except (httpx2.HTTPError, TimeoutError, ServerError):
            is_there = is_news = False  # it is asked again after the next answer
        if self._asked_at == began:  # else an answer has begun since
            self._responds = is_there
        if not is_news:
            return
        self._has_learnt = True
        try:
            values = list(await json_values(body))
        except UpstreamFailed:
            return
        listed = values[0] if values and response.status_code == 200 else None
        self.learnt = facts = facts_in(listed, self.spec.model)
        learnt = {
            k: v for k, v in facts.capabilities.items() if k not in self.spec.capabilities.stated
        }
        known = cast(dict[str, Any], {**self._seen, **learnt})
        self.capabilities = replace(self.spec.capabilities, **known)
        log.debug("%s: its server says %s", self.id, learnt)

    def saw_reasoning(self, name: str | None) -> None:
        """Records that an answer had reasoning in the field `name`. Then the upstream accepts
        earlier reasoning there, and may refuse the results of calls without it."""
        is_known = self._seen or "reasoning_messages" in self.spec.capabilities.stated
        if name and self.spec.kind == "openai" and not is_known:
            self._seen = {"reasoning_messages": "tool_rounds", "reasoning_field": name}
            if not self.capabilities.reasoning_messages:
                self.capabilities = replace(self.capabilities, **cast(dict[str, Any], self._seen))

    async def open(
        self, request: UpstreamRequest, body: Mapping[str, Any], allowance: Allowance
    ) -> UpstreamStream:
        """Sends the request until an answer begins. Raises ServerError if none does."""
        if request.hops >= limits.UPSTREAM_HOPS:
            raise UpstreamLoop(
                f"The request for {self.id} was passed on from server to server {request.hops} "
                "times. Check in their models.yaml that no `source` leads back to the first."
            )
        for attempt in range(self.spec.policy.retries + 1):
            if left := self.breaker.seconds_left(request.client):
                raise UpstreamBusy(
                    f"The upstream of {self.id} failed several times in a row. It is asked again "
                    f"in {left:.0f} seconds."
                )
            try:
                return await self._attempt(request, body, allowance)
            except Retriable as failure:
                seconds = pause_before(attempt, failure)
                if seconds is None or attempt == self.spec.policy.retries:
                    raise failure.error from None
                # logs only the code, since the server's message may quote the prompt
                log.info("%s: %s, trying again in %.1f s", self.id, failure.error.code, seconds)
                await asyncio.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(
        self, request: UpstreamRequest, body: Mapping[str, Any], allowance: Allowance
    ) -> UpstreamStream:
        breaker, client = self.breaker, request.client
        breaker.begin(client)
        try:
            stream = await self._sent(request, body, allowance)
        except Retriable as failure:
            self.last_error = f"The last request failed: {failure.error.code}."
            if isinstance(failure, Unreachable):
                self._responds = False
                breaker.unreachable(client)
            elif failure.error.status != UpstreamBusy.status or failure.pause is None:
                breaker.failed(client)
            else:
                breaker.abandoned(client)
            raise
        except BaseException:
            breaker.abandoned(client)
            raise
        breaker.succeeded(client)
        self.last_error, self._responds, self._asked_at = None, True, time.monotonic()
        self.learn_soon()
        return stream

    async def _sent(
        self, request: UpstreamRequest, body: Mapping[str, Any], allowance: Allowance
    ) -> UpstreamStream:
        policy, again = self.spec.policy, True
        try:
            async with asyncio.timeout(policy.first_seconds):
                while True:
                    response = await self._response(request, body)
                    if response.status_code != 401 or not (again and self._credentials.refused()):
                        break
                    await response.aclose()
                    again = False
                return await self._begun(response, allowance)
        except TimeoutError:
            raise Retriable(
                UpstreamTimeout(
                    f"The upstream of {self.id} did not begin to answer within "
                    f"{policy.first_seconds:g} seconds."
                )
            ) from None
        except httpx2.PoolTimeout:
            raise UpstreamBusy(
                f"All connections to the upstream of {self.id} are in use. Try again later."
            ) from None
        except httpx2.ConnectTimeout:
            raise Unreachable(
                UpstreamTimeout(
                    f"The upstream of {self.id} took no connection within "
                    f"{limits.UPSTREAM_CONNECT_SECONDS:g} seconds."
                )
            ) from None
        except httpx2.HTTPError as error:  # only its type is shown, since its text may have the URL
            kind = Unreachable if isinstance(error, httpx2.ConnectError) else Retriable
            raise kind(
                UpstreamFailed(
                    f"The upstream of {self.id} can't be reached, or lost the connection "
                    f"({type(error).__name__})."
                )
            ) from None

    async def _response(self, request: UpstreamRequest, body: Mapping[str, Any]) -> httpx2.Response:
        http = self._http()
        sent = http.build_request(
            "POST",
            endpoint(self.spec, request.route),
            content=msgspec.json.encode(body_for(self.spec, body)),
            headers={
                "content-type": "application/json",
                HOPS_HEADER: str(request.hops + 1),
                **await self._credentials.headers(),
            },
        )
        return await http.send(sent, stream=True)

    async def _begun(self, response: httpx2.Response, allowance: Allowance) -> UpstreamStream:
        try:
            if response.status_code != 200:
                await self._refused(response)
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                # a few compressed bytes may expand to any size
                raise UpstreamFailed(f"The upstream of {self.id} sent compressed data.")
            values = response_values(response, allowance)
            first = await anext(values, None)
            if first is None:
                raise Retriable(UpstreamFailed(f"The upstream of {self.id} sent no answer."))
            self.check(first)
            return UpstreamStream(self, response, first, values, allowance)
        except UpstreamBusy as error:  # reported in a response with status 200
            await response.aclose()
            raise Retriable(error) from None
        except BaseException:
            await response.aclose()
            raise

    async def _refused(self, response: httpx2.Response) -> None:
        body = await limited(response, limits.UPSTREAM_ERROR_BYTES)
        error = refusal(self.id, response.status_code, body, self.secrets)
        if response.status_code in RETRIED:
            raise Retriable(error, retry_after(response.headers))
        raise error

    @property
    def secrets(self) -> tuple[str, ...]:
        spec = self.spec
        return (*self._credentials.secrets, spec.project_id or "", spec.space_id or "")

    def check(self, value: Any) -> None:
        """Raises ServerError for a value that reports an error."""
        if isinstance(value, dict) and (error := error_in(value)):
            raise reported(self.id, error, self.secrets)

    def _http(self) -> httpx2.AsyncClient:
        if self._client is None:
            most = limits.UPSTREAM_CONNECTIONS
            self._client = httpx2.AsyncClient(
                headers={"accept-encoding": "identity"},
                timeout=httpx2.Timeout(limits.UPSTREAM_CONNECT_SECONDS, read=None, write=None),
                follow_redirects=False,
                transport=BoundedTransport(
                    limits=httpx2.Limits(max_connections=most, max_keepalive_connections=most // 4),
                    trust_env=False,
                    # watsonx's key goes to IAM_URL, wherever the model is
                    verify=self.spec.kind == "watsonx" or self.spec.url.startswith("https:"),
                ),
            )
        return self._client
