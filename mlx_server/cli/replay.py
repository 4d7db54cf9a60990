"""`mlx-server replay record`: real answers as a transcript for a replay model."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from pydantic import ValidationError

from mlx_server import limits
from mlx_server.api.chat_completions.input import ChatBody, to_request
from mlx_server.api.replay import (
    Entry,
    TranscriptRecorder,
    conditions,
    in_words,
    without_keys,
    written,
)
from mlx_server.app import create_app, run_app
from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.clients.chat import JSON, checked_url, parsed_json
from mlx_server.config.models_yaml import load_settings, spec_named, upstream_model
from mlx_server.config.settings import Settings
from mlx_server.engine.messages import Token
from mlx_server.errors import (
    BadRequest,
    GenerationFailed,
    SettingsError,
    Unavailable,
    public_message,
)
from mlx_server.events import Answer, Started
from mlx_server.generation.generate import generate
from mlx_server.generation.plan import plan, shortened
from mlx_server.http.errors import validation_error
from mlx_server.pool.models import progress_display
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest
from mlx_server.system.files import own_path

TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True)
class RecordedServer:
    url: str
    """Its base URL, such as `http://127.0.0.1:8001/v1`."""
    model: str
    key: str | None = None

    def answers(self, bodies: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
        """The `answer` of a transcript's entry to each body of /v1/chat/completions."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        url = checked_url(self.url, "The URL after --upstream")
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT) as client:
            for number, body in enumerate(bodies, 1):
                yield _answer(self._asked(client, body, number), number)

    def _asked(self, client: httpx.Client, body: Mapping[str, Any], number: int) -> Any:
        whole = {**body, "model": self.model, "stream": False}
        sent = client.build_request(
            "POST", "/chat/completions", content=json.dumps(whole), headers=JSON
        )
        try:
            response = client.send(sent, stream=True)
            answer = parsed_json(_body(response, number))
        except httpx.HTTPError as error:
            raise Unavailable(
                f"The server at --upstream did not answer request {number}: "
                f"{type(error).__name__}. Check the URL, and that the server runs."
            ) from None
        if not response.is_success:
            raise BadRequest(
                f"The server at --upstream refused request {number} (HTTP {response.status_code})"
                f"{_message(answer)}"
            )
        return answer


def _body(response: httpx.Response, number: int) -> bytes:
    body = bytearray()
    with closing(response):
        for piece in response.iter_bytes():
            body += piece
            if len(body) > (most := limits.UPSTREAM_LINE_BYTES):
                raise GenerationFailed(
                    f"The answer to request {number} is larger than {most >> 20} MiB."
                )
    return bytes(body)


def _answer(completion: Any, number: int) -> Entry:
    try:
        message = completion["choices"][0]["message"]
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
        answer = {"reasoning": reasoning, "text": message.get("content") or "", "calls": calls}
    except (TypeError, KeyError, IndexError, AttributeError, ValueError):
        raise GenerationFailed(
            f"The answer to request {number} is not in the format of OpenAI's chat completions."
        ) from None
    return {name: value for name, value in answer.items() if value} or {"text": ""}


def _call(function: Mapping[str, Any]) -> Entry:
    arguments = function.get("arguments") or {}
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(parsed, dict):
        raise TypeError("the arguments are no object")
    return {"name": function["name"], "arguments": parsed}


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {message[:500]}" if isinstance(message, str) else "."


def serve_recorded(
    model: str,
    output: Path,
    config: Path | None,
    upstream: str | None,
    api_key_env: str | None,
    port: int | None,
) -> None:
    """Serves until Ctrl-C. upstream: the base URL of a server that is not in models.yaml."""
    settings = recorded_settings(model, config, upstream, api_key_env, port)
    recorder = TranscriptRecorder(output, secrets_of(settings))
    run_app(settings, lambda: create_app(settings, progress_display(), recorder=recorder))


def recorded_settings(
    model: str, config: Path | None, upstream: str | None, api_key_env: str | None, port: int | None
) -> Settings:
    """Those of models.yaml, with this model alone."""
    settings = load_settings(config, overrides={"port": port})
    named = {id: m for id, m in settings.models.items() if model in (id, *m.aliases)}
    if upstream is not None:
        named = {model: upstream_model(model, upstream, api_key_env)}
    elif not named:
        named = dict(load_settings(None, models=[model], environ={}).models)
    return replace(settings, models=named)


def secrets_of(settings: Settings) -> list[str]:
    """The keys of the models' servers, and those of this server's clients."""
    variables = (model.api_key_env for model in settings.models.values())
    own = (key.get_secret_value() for key in settings.server.api_keys)
    return [*filter(None, (os.environ.get(name or "") for name in variables)), *own]


MAX_FILE_BYTES = 64 << 20

Body = dict[str, Any]
"""The body of a request to /v1/chat/completions."""


def read_requests(path: Path, model: str) -> list[tuple[Body, GenerateRequest]]:
    """Reads a YAML list or JSON Lines of user texts or of /v1/chat/completions bodies.

    Raises BadRequest for a file or an item that is neither.
    """
    try:
        items = _items(path)
    except OSError as error:
        raise BadRequest(f"{path.name} can't be read: {public_message(error)}.") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise BadRequest(f"{path.name} is not a file of YAML or JSON Lines: {error}") from None
    if not isinstance(items, list):
        raise BadRequest(f"{path.name} should have a list of requests.")
    return list(_requests(items, model))


def _items(path: Path) -> Any:
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    text = raw.decode("utf-8-sig")
    if path.suffix in (".jsonl", ".ndjson"):
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    return yaml.safe_load(text) or []


def _requests(items: Iterable[Any], model: str) -> Iterator[tuple[Body, GenerateRequest]]:
    for i, item in enumerate(items):
        body = {"messages": [{"role": "user", "content": item}]} if isinstance(item, str) else item
        try:
            yield body, to_request(ChatBody.model_validate({**body, "model": model}))
        except ValidationError as error:
            problem = validation_error(error, body)
            raise BadRequest(f"Request {i + 1}: {problem.message}", param=problem.param) from None
        except TypeError:
            raise BadRequest(
                f"Request {i + 1} must be a text or a body of /v1/chat/completions."
            ) from None


def record_upstream(
    server: RecordedServer,
    requests: list[tuple[Body, GenerateRequest]],
    on_entry: Callable[[Entry], None],
) -> list[Entry]:
    """Records another server, like `record`. Entries have the answers in words, for any family."""
    entries: list[Entry] = []
    answers = server.answers(body for body, _ in requests)
    for answer, (_, request) in zip(answers, requests, strict=True):
        entry = {**conditions(request.prompts[0]), "answer": answer}
        entries.append(without_keys(entry, [server.key or ""]))
        on_entry(entries[-1])
    return entries


def record_model(
    spec: ModelSpec, requests: list[GenerateRequest], on_entry: Callable[[Entry], None]
) -> list[Entry]:
    """One transcript entry for each request, in order. `on_entry` gets each when it is done.

    A model that this server runs is recorded as it writes, a model on another server in words.
    """
    return asyncio.run(_recorded(spec, requests, on_entry))


async def _recorded(
    spec: ModelSpec, requests: list[GenerateRequest], on_entry: Callable[[Entry], None]
) -> list[Entry]:
    pool = Pool([spec])
    variable = spec.upstream.api_key_env if spec.upstream else None
    key = os.environ.get(variable) if variable else None
    await pool.start()
    try:
        entries = []
        for request in requests:
            entries.append(without_keys(await _entry(pool, request), [key or ""]))
            on_entry(entries[-1])
        return entries
    finally:
        await pool.stop()


async def _entry(pool: Pool, request: GenerateRequest) -> Entry:
    if pool.models.upstream(request.model):
        return {**conditions(request.prompts[0]), "answer": await _words(pool, request)}
    prepared = await pool.prepared(request.model)
    planned = await in_thread(plan, prepared, request)
    planned = shortened(planned, prepared, request, pool.most_tokens(prepared, planned.demand.rows))
    tokens: list[Token] = []
    async with (
        pool.lease(prepared, planned.demand) as lease,
        lease.engine.generate(planned.rows[:1]) as feed,
    ):
        lease.began(planned.rows[:1])
        while not (tokens and tokens[-1].finish):
            tokens += [item for item in await feed.take() if isinstance(item, Token)]
    finish = tokens[-1].finish
    # the replay model adds the stop token itself
    ids = [token.id for token in (tokens[:-1] if finish == "stop" else tokens)]
    entry = {**conditions(request.prompts[0]), "output": prepared.checkpoint.tokenizer.raw(ids)}
    return entry | ({"finish": "length"} if finish == "length" else {})


async def _words(pool: Pool, request: GenerateRequest) -> Entry:
    """The answer of a model on another server, as every endpoint has it: read and repaired."""
    answer = Answer()
    async with aclosing(generate(replace(request, buffered=True), pool)) as events:
        async for event in events:
            if not isinstance(event, Started):
                answer.add(event)
    return in_words(answer)


app = command_app(no_args_is_help=True)


@app.callback()
def replay() -> None:
    """Record answers, for tests without weights."""


def _in_a_folder(output: Path | None) -> Path | None:
    """Checks before the answers are recorded, which takes long, that they can be kept."""
    if output is None:
        return None
    try:
        if not output.absolute().parent.is_dir():
            raise typer.BadParameter(f"There is no such folder: {output.parent}")
        existed = output.exists()
        if output.is_file() or not existed:  # a pipe's reader would take this for the end
            (place := own_path(output)).open("ab").close()
        if not existed:
            place.unlink()
    except OSError as error:
        raise typer.BadParameter(f"{output.name} can't be written: {error.strerror}.") from None
    return output


@app.command()
def record(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Id from models.yaml, folder, hub id, or upstream's."),
    ],
    requests: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="YAML list or JSON Lines of requests [an app's own].",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            callback=_in_a_folder,
            metavar="FILE",
            help="Write the transcript here [standard output].",
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Record the OpenAI-compatible server at this base URL."),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The environment variable with the upstream's key."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on for an app's requests [8000].")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Record a real model's answers to requests as a transcript.

    \b
    mlx-server replay record smollm2-135m --requests questions.yaml --output answers.yaml
    mlx-server replay record llama3.2 --upstream http://127.0.0.1:11434/v1 --requests questions.yaml
    mlx-server replay record openai/gpt-oss-120b --upstream https://openrouter.ai/api/v1 \
        --api-key-env OPENROUTER_API_KEY --requests questions.yaml --output answers.yaml
    mlx-server replay record llama3.2 --upstream http://127.0.0.1:11434/v1 --output answers.yaml

    Without --requests this server starts, with all its endpoints. It passes on what an app asks of
    MODEL, and adds each answer to the transcript as the app gets it, until Ctrl-C.

    A model of models.yaml that another server has is recorded as the endpoints give its answers:
    read, repaired and asked for again. With --upstream answers are recorded as they come.

    A request is a text or a body of /v1/chat/completions. To serve the transcript, set `source:
    replay:answers.yaml` and a `family:` in models.yaml: the model's, or any for the answers of an
    upstream, which are recorded in words. Keys are taken out of what is recorded.
    """
    if requests is None:
        if output is None:
            raise typer.BadParameter("--output FILE is needed where a server records.")
        serve_recorded(model, output, config, upstream, api_key_env, port)
        return
    text = _transcript(model, requests, config, upstream, api_key_env)
    if output:
        _save(text, output)
    else:
        print(text, end="")


def _save(text: str, output: Path) -> None:
    """Replaces a file only when all is written, so that a full disk leaves the old one."""
    if output.exists() and not output.is_file():  # such as a pipe
        output.write_text(text, "utf-8")
        return
    path = own_path(output)  # a link stays a link
    draft = path.with_name(f".{secrets.token_hex(8)}")
    try:
        draft.write_text(text, "utf-8")
        if path.exists():
            draft.chmod(path.stat().st_mode & 0o777)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _transcript(
    model: str, requests: Path, config: Path | None, upstream: str | None, api_key_env: str | None
) -> str:
    if upstream is not None:
        server = _server(upstream, model, api_key_env)
        return written(record_upstream(server, read_requests(requests, model), _show))
    spec = spec_named(config, model)
    asked = [request for _, request in read_requests(requests, spec.id)]
    return written(record_model(spec, asked, _show))


def _server(url: str, model: str, api_key_env: str | None) -> RecordedServer:
    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        raise SettingsError(f"The environment variable {api_key_env} has no key. Set it first.")
    return RecordedServer(url, model, key)


def _show(entry: dict[str, Any]) -> None:
    size = len(entry["output"]) if "output" in entry else len(str(entry["answer"]))
    print(f"{entry['match'][:40]!r}: {size} characters", file=sys.stderr)
