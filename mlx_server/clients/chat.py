"""A chat in the terminal, over the server's HTTP API."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from threading import Thread
from types import FrameType
from typing import IO, Any, NoReturn

import httpx

from mlx_server.clients.exchange import cut_off
from mlx_server.config.models_yaml import load_settings
from mlx_server.errors import BadRequest, GenerationFailed, ServerError, Unauthorized, Unavailable
from mlx_server.events import ReasoningDelta, TextDelta
from mlx_server.system.listening_sockets import DEFAULT_URL
from mlx_server.upstream.pieces import read_piece

STOP_SECONDS = 15.0
"""How long a server that was started for the chat may take to end before it is killed."""

SERVE = [sys.executable, "-m", "mlx_server", "serve"]
SERVE += ["--host", "127.0.0.1", "--port", "0", "--log-level", "warning"]

Delta = TextDelta | ReasoningDelta


@dataclass
class Chat:
    client: httpx.Client
    """Has the server's `base_url` and the key in its headers."""
    model: str
    system: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the request: `temperature`, `max_tokens`."""
    turns: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str) -> Generator[Delta]:
        """Streams the answer. Closing the generator early stops the answer.

        A stopped answer stays in the conversation. After an error neither `text` nor the answer
        does.
        """
        answer: list[str] = []
        try:
            with closing(self._stream(text)) as deltas:
                for delta in deltas:
                    if isinstance(delta, TextDelta):
                        answer.append(delta.text)
                    yield delta
        except (GeneratorExit, KeyboardInterrupt):
            self._remember(text, "".join(answer))
            raise
        self._remember(text, "".join(answer))

    def reset(self) -> None:
        self.turns.clear()

    def _remember(self, text: str, answer: str) -> None:
        if answer:
            self.turns += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer},
            ]

    def _stream(self, text: str) -> Generator[Delta]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.turns, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "stream": True, **self.options}
        with (
            _connection_errors(),
            self.client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if not response.is_success:
                response.read()
                raise _refused(response)
            yield from _deltas(response.iter_lines())


def _deltas(lines: Iterator[str]) -> Iterator[Delta]:
    """The deltas in a stream of `data:` lines. Raises GenerationFailed if `[DONE]` is missing."""
    for line in lines:
        name, _, data = line.partition(":")
        if name != "data":
            continue
        if data.strip() == "[DONE]":
            return
        yield from _delta(_parsed(data))
    raise cut_off()


def _parsed(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise GenerationFailed("The answer is not in the format of OpenAI's chat completions.")
    if error := chunk.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise GenerationFailed(str(message))
    return chunk


def _delta(chunk: Mapping[str, Any]) -> Iterator[Delta]:
    piece = read_piece(chunk)
    if piece.reasoning:
        yield ReasoningDelta(0, piece.reasoning)
    if piece.text:
        yield TextDelta(0, piece.text)


def _refused(response: httpx.Response) -> ServerError:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, TypeError, KeyError):
        message = "That server is not OpenAI-compatible. Check --url."
    if response.status_code == 401:
        return Unauthorized(f"{message} Give the key with --api-key.")
    return BadRequest(f"{message} (HTTP {response.status_code})")


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        message = "Nothing listens at that URL. Start a server with `mlx-server serve`."
        raise Unavailable(message) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise GenerationFailed(f"The connection to the server failed: {error}") from error


def client_of(url: str, key: str | None) -> httpx.Client:
    """A client for the server at `url`, with or without `/v1` at the end."""
    if key and not re.fullmatch(r"[!-~]+", key):
        raise BadRequest("The API key has characters other than visible ASCII. Check --api-key.")
    with _connection_errors():
        return httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=5.0),  # a model may have to be loaded first
            trust_env=False,  # requests to this machine must not go to a proxy
        )


def served_models(client: httpx.Client) -> list[str]:
    """The ids of /v1/models."""
    with _connection_errors():
        response = client.get("/v1/models")
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, TypeError, KeyError):
        raise _refused(response) from None


@contextmanager
def connected(
    url: str | None, key: str | None, model: str | None
) -> Iterator[tuple[httpx.Client, str]]:
    """A client, and the id of the model to chat with.

    If no server listens at the default URL, one is started until the end of the block.
    """
    is_default = url in (None, DEFAULT_URL)
    if is_default and not _is_listening(DEFAULT_URL):
        arguments, model_id = _to_serve(model)
        with own_server([*SERVE, *arguments]) as server, client_of(*server) as client:
            yield client, model_id
        return
    if is_default:
        key = key or key_at_home()
    with client_of(url or DEFAULT_URL, key) as client:
        yield client, model or _first(served_models(client))


def key_at_home() -> str:
    """The first key of MLX_SERVER_API_KEYS, which a server on this machine is likely to share."""
    return os.environ.get("MLX_SERVER_API_KEYS", "").split(",")[0].strip()


def _to_serve(model: str | None) -> tuple[list[str], str]:
    """Arguments that make `mlx-server serve` serve `model`, and the id it has there."""
    listed = load_settings(None).models
    if model is None:
        return [], next(iter(listed))
    if any(model in (model_id, *settings.aliases) for model_id, settings in listed.items()):
        return [], model
    *_, model_id = load_settings(None, models=[model]).models
    return [model], model_id


def _first(models: Sequence[str]) -> str:
    if models:
        return models[0]
    raise BadRequest("The server lists no models. Choose one with `mlx-server chat MODEL`.")


def _is_listening(url: str) -> bool:
    address = httpx.URL(url)
    try:
        socket.create_connection((address.host, address.port or 80), timeout=2).close()
    except OSError:
        return False
    return True


@contextmanager
def own_server(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Runs `command` until the end of the block. Yields its URL and the key made for it."""
    key = secrets.token_urlsafe()
    with _exit_on_signals():
        child = subprocess.Popen(
            command,
            env={**os.environ, "MLX_SERVER_API_KEYS": key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal should stop an answer, not the server
        )
        assert child.stdout
        try:
            yield _address(child.stdout), key
        finally:
            _stop(child)


def _address(output: IO[str]) -> str:
    for line in output:
        if listening := re.match(r"Listening on (http://\S+)", line):
            Thread(target=_drain, args=(output,), daemon=True).start()
            return listening[1]
    output.close()
    raise Unavailable("The server for this chat did not start. The reason is printed above.")


def _drain(output: IO[str]) -> None:
    with output:
        deque(output, maxlen=0)


def _stop(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Makes a closed terminal or `kill` raise SystemExit, so that every `finally` runs."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _exit) for number in signals}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def ask(chat: Chat, text: str, show: Callable[[Delta], None]) -> None:
    with closing(chat.say(text)) as deltas:
        for delta in deltas:
            show(delta)


def converse(
    chat: Chat,
    read: Callable[[], str],
    show: Callable[[Delta], None],
    note: Callable[[str], None],
) -> None:
    """Chats until /exit or the end of input. Ctrl-C and errors end an answer, never the chat."""
    while True:
        try:
            text = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            note("/exit or Ctrl-D ends the chat.")
            continue
        if text == "/exit":
            return
        _take(chat, text, show, note)


def _take(
    chat: Chat, text: str, show: Callable[[Delta], None], note: Callable[[str], None]
) -> None:
    if text == "/reset":
        chat.reset()
        note("Started a new conversation.")
    elif re.fullmatch(r"/\w+", text):
        note("Unknown command. The commands are /reset and /exit.")
    elif text:
        try:
            ask(chat, text, show)
            note("")
        except KeyboardInterrupt:
            note("\nStopped.")
        except ServerError as error:
            note(f"\n{error.message}")
