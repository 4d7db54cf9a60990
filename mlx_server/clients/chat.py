"""A chat in the terminal, over the server's HTTP API."""

import base64
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from mimetypes import guess_type
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import quote

import httpx

from mlx_server.clients.exchange import cut_off
from mlx_server.config.models_yaml import load_settings
from mlx_server.errors import (
    BadRequest,
    GenerationFailed,
    ServerError,
    SettingsError,
    Unauthorized,
    Unavailable,
)
from mlx_server.events import ReasoningDelta, TextDelta
from mlx_server.json_bounds import json_or_none
from mlx_server.system.listening_sockets import DEFAULT_URL, announced_url, is_loopback
from mlx_server.upstream.pieces import read_piece

STOP_SECONDS = 15.0
"""How long a server that was started for the chat may take to end before it is killed."""

SERVE = [sys.executable, "-m", "mlx_server", "serve"]
SERVE += ["--host", "127.0.0.1", "--port", "0", "--log-level", "warning"]

JSON = {"Content-Type": "application/json"}

Delta = TextDelta | ReasoningDelta


@dataclass
class Chat:
    client: httpx.Client
    """A client of the server, which sends its key with each request: see `client_of`."""
    model: str
    system: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    """Fields added to each request, for example `temperature` and `max_tokens`."""
    connectors: Sequence[str] = ()
    """MCP servers of the server's models.yaml, whose tools it runs without asking."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    """Parts of the next message, as `picture_part` makes them."""

    def say(self, text: str) -> Generator[Delta]:
        """Sends the user's text and streams the answer. Closing the generator stops the answer.

        A stopped answer stays in the conversation; after an error neither it nor `text` does.
        """
        answer: list[str] = []
        said: Any = text
        if self.pictures:
            said = [*self.pictures, {"type": "text", "text": text}]
        try:
            with closing(self._stream(said)) as deltas:
                for delta in deltas:
                    if isinstance(delta, TextDelta):
                        answer.append(delta.text)
                    yield delta
        except (GeneratorExit, KeyboardInterrupt):
            self._remember(said, "".join(answer))
            raise
        self._remember(said, "".join(answer))

    def reset(self) -> None:
        self.turns.clear()

    def _remember(self, said: Any, answer: str) -> None:
        if answer:
            self.pictures.clear()
            self.turns += [
                {"role": "user", "content": said},
                {"role": "assistant", "content": answer},
            ]

    def _stream(self, said: Any) -> Generator[Delta]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.turns, {"role": "user", "content": said}]
        asked = {"model": self.model, "stream": True, **self.options}
        path, body, read = "/v1/chat/completions", {**asked, "messages": messages}, _deltas
        if self.connectors:  # tools that the server runs belong to the API of Responses
            tools = [*map(_connector, self.connectors)]
            path, read = "/v1/responses", _responses_deltas
            body = {**asked, "input": messages, "tools": tools, "store": False}
            if "max_tokens" in body:
                body["max_output_tokens"] = body.pop("max_tokens")
        with (
            connection_errors(),
            self.client.stream("POST", path, content=json.dumps(body), headers=JSON) as response,
        ):
            if not response.is_success:
                response.read()
                raise _refused(response)
            yield from read(_data(response.iter_lines()))


def picture_part(file: Path) -> dict[str, Any]:
    """The file as a part of a message. Raises BadRequest if it can't be read."""
    try:
        data = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        raise BadRequest(f"The picture {str(file)!r} can't be read: {error.strerror}.") from None
    kind = guess_type(file.name)[0] or "image/*"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _connector(name: str) -> dict[str, str]:
    label = re.sub(r"[^\w-]", "_", name, flags=re.ASCII)
    tool = {"type": "mcp", "connector_id": name, "server_label": label}
    return {**tool, "require_approval": "never"}


def _data(lines: Iterator[str]) -> Iterator[str]:
    """The data of an event stream. Raises GenerationFailed if it ends before what reads it does."""
    for line in lines:
        name, _, data = line.partition(":")
        if name == "data":
            yield data
    raise cut_off()


def _deltas(events: Iterator[str]) -> Iterator[Delta]:
    for data in events:
        if data.strip() == "[DONE]":
            return
        chunk = parsed_chunk(data)
        piece = read_piece(chunk)
        if piece.reasoning:
            yield ReasoningDelta(0, piece.reasoning)
        if piece.text:
            yield TextDelta(0, piece.text)


def _responses_deltas(events: Iterator[str]) -> Iterator[Delta]:
    """What the server does with tools is shown as reasoning is."""
    for data in events:
        match parsed_chunk(data):
            case {"type": "response.output_text.delta", "delta": str(text)}:
                yield TextDelta(0, text)
            case {"type": "response.reasoning_text.delta", "delta": str(text)}:
                yield ReasoningDelta(0, text)
            case {"type": "response.output_item.done", "item": {"type": "mcp_call", **call}}:
                yield ReasoningDelta(0, f"\n[{call.get('name')} {call.get('arguments')}]\n")
            case {"item": {"type": "mcp_list_tools", "error": error, **listed}} if error:
                yield ReasoningDelta(0, f"\n[{listed.get('server_label')} has no tools: {error}]\n")
            case {"type": "response.completed" | "response.incomplete"}:
                return
            case {"type": "response.failed", "response": {"error": {"message": message}}}:
                raise GenerationFailed(str(message))
            case {"type": "error", "message": message}:
                raise GenerationFailed(str(message))


def parsed_chunk(data: str) -> dict[str, Any]:
    """Raises GenerationFailed for a chunk that reports an error or is no object."""
    chunk = json_or_none(data)
    if not isinstance(chunk, dict):
        raise GenerationFailed("The answer is not in the format of OpenAI's chat completions.")
    if error := chunk.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise GenerationFailed(str(message))
    return chunk


def error_in(body: Any) -> dict[str, Any]:
    """Returns the fields of an OpenAI error; none if the body is no error."""
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _refused(response: httpx.Response) -> ServerError:
    message = error_in(json_or_none(response.content)).get("message")
    message = message or "That server is not OpenAI-compatible. Check --url."
    if response.status_code == 401:
        return Unauthorized(f"{message} Give the key with --api-key.")
    return BadRequest(f"{message} (HTTP {response.status_code})")


UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What reading an answer of another form raises."""


def answered(response: httpx.Response) -> dict[str, Any]:
    """The object that a server answers with. Raises ServerError for a refusal or another body."""
    body = json_or_none(response.content)
    if not response.is_success or not isinstance(body, dict):
        raise _refused(response)
    return body


@contextmanager
def connection_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        place = address_of(error.request.url)
        raise Unavailable(
            f"No server answers at {place}: {error}. Start one with `mlx-server serve`."
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise GenerationFailed(f"The connection to the server failed: {error}") from error


def address_of(url: httpx.URL) -> str:
    """The URL without its path and its password."""
    return f"{url.scheme}://{url.netloc.decode()}"


def client_of(url: str, key: str | None) -> httpx.Client:
    """An HTTP client that sends `key`. The server's `url` may end in `/v1`.

    Raises SettingsError if it is not a URL.
    """
    if key and not re.fullmatch(r"[!-~]+", key):
        raise BadRequest("The API key has characters other than visible ASCII. Check --api-key.")
    return httpx.Client(
        base_url=checked_url(url.rstrip("/").removesuffix("/v1")),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(None, connect=5.0),  # loading a model may take minutes
        trust_env=False,  # else HTTP_PROXY would catch requests to this machine
    )


def checked_url(url: str) -> httpx.URL:
    """Raises SettingsError for a text that is no http URL of a host. The message does not repeat
    the text, which may have a password."""
    try:
        checked = httpx.URL(url)
        checked.host.encode("idna")
        is_http = checked.scheme in ("http", "https")
        if is_http and checked.host and 0 <= (checked.port or 80) < 1 << 16:
            return checked
    except (httpx.InvalidURL, ValueError):
        pass
    raise SettingsError(f"The URL of the server should be one like {DEFAULT_URL}.")


def model_facts(client: httpx.Client, model: str) -> dict[str, Any]:
    """What `/v1/models` says of one model. Raises ServerError if no server answers, or if it does
    not serve the model."""
    with connection_errors():
        return answered(client.get(_model_path(model)))


def _model_path(model: str) -> str:
    return f"/v1/models/{quote(model, safe='/:', errors='replace')}"


@contextmanager
def connected(
    url: str | None, key: str | None, model: str | None
) -> Iterator[tuple[httpx.Client, str]]:
    """Yields an HTTP client and the id of the model to chat with.

    Without a `url`, and if no server listens at the default one, a server is started and runs
    until the end of the block.
    """
    is_default = url in (None, DEFAULT_URL)
    if is_default and not _is_listening(DEFAULT_URL):
        arguments, model_id = _to_serve(model)
        with own_server([*SERVE, *arguments]) as server, client_of(*server) as client:
            yield client, model_id or first_model(client)
        return
    if is_default:
        key = key or key_at_home(DEFAULT_URL)
    with client_of(DEFAULT_URL if url is None else url, key) as client:
        if model:
            _check_served(client, model)
        yield client, model or first_model(client)


def _check_served(client: httpx.Client, model: str) -> None:
    """Raises BadRequest if the server says that it has no such model."""
    with connection_errors():
        response = client.get(_model_path(model))
    code = error_in(json_or_none(response.content)).get("code")
    if code in ("model_not_found", "adapter_not_found"):
        raise _refused(response)


def key_at_home(url: str) -> str:
    """The first of MLX_SERVER_API_KEYS, since a server on this machine is probably started with the
    same environment; empty if the variable is not set, and for other machines, whose keys are
    others'."""
    if not is_loopback(checked_url(url).host):
        return ""
    return os.environ.get("MLX_SERVER_API_KEYS", "").split(",")[0].strip()


def _to_serve(model: str | None) -> tuple[list[str], str | None]:
    """Arguments with which `mlx-server serve` serves `model`, and the id of the model there."""
    if model is None:
        return [], None
    listed = load_settings(None).models
    if any(model in (model_id, *settings.aliases) for model_id, settings in listed.items()):
        return [], model
    *_, model_id = load_settings(None, models=[model]).models
    return [model], model_id


def first_model(client: httpx.Client) -> str:
    """The first model that answers in text. Raises ServerError if no server answers or it lists
    none."""
    with connection_errors():
        response = client.get("/v1/models")
    try:
        models = [(model["id"], model) for model in json_or_none(response.content)["data"]]
    except (TypeError, KeyError):
        raise _refused(response) from None
    for id, model in models:
        # others could be neither shown nor asked for; other servers have no types
        if isinstance(id, str) and id.isprintable() and model.get("type", "llm") == "llm":
            return id
    raise BadRequest(
        "The server lists no models that can answer. Name one, or list one in its models.yaml."
    )


def _is_listening(url: str) -> bool:
    address = httpx.URL(url)
    try:
        socket.create_connection((address.host, address.port or 80), timeout=2).close()
    except OSError:
        return False
    return True


@contextmanager
def own_server(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Runs a server by `command` until the end of the block, with a new random key.

    Yields its URL and the key.
    """
    key = secrets.token_urlsafe()
    with _exit_on_signals():
        child = subprocess.Popen(
            command,
            env={**os.environ, "MLX_SERVER_API_KEYS": key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal stops an answer, not the server
        )
        assert child.stdout
        try:
            if (url := announced_url(child.stdout)) is None:
                raise Unavailable("The server for this chat did not start: see above.")
            yield url, key
        finally:
            _stop(child)


def _stop(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turns SIGHUP and SIGTERM into SystemExit, so that every `finally` runs when the terminal
    closes or the process is killed."""
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
    chat: Chat, read: Callable[[], str], show: Callable[[Delta], None], note: Callable[[str], None]
) -> None:
    """Chats until `/exit` or the end of input. Ctrl-C and errors end an answer but not the chat."""
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
        _answer_input(chat, text, show, note)


def _answer_input(
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
