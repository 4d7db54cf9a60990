"""`mlx-server replay record`: real answers as a transcript for a replay model."""

import asyncio
import os
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from pydantic import ValidationError

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
from mlx_server.config.models_yaml import load_settings, spec_named, upstream_model
from mlx_server.config.settings import Settings, model_spec
from mlx_server.engine.messages import Token
from mlx_server.errors import BadRequest
from mlx_server.events import Answer, Started
from mlx_server.generation.generate import generate
from mlx_server.generation.plan import plan, shortened
from mlx_server.http.errors import validation_error
from mlx_server.pool.models import progress_display
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest
from mlx_server.sources.transcript import MalformedList, listed
from mlx_server.system.files import own_path, replace_file


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
    """The settings of models.yaml, with this model alone."""
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
    theirs = filter(None, (os.environ.get(name or "") for name in variables))
    return [*theirs, *settings.server.keys]


def read_requests(path: Path, model: str) -> list[GenerateRequest]:
    """Reads a list of user texts or of /v1/chat/completions bodies. Raises BadRequest."""
    try:
        items = listed(path)
    except MalformedList as error:
        raise BadRequest(f"{path.name}:{error.line}: {error}") from None
    return [_request(item, model, f"{path.name}:{line}") for line, item in items]


def _request(item: Any, model: str, place: str) -> GenerateRequest:
    body = {"messages": [{"role": "user", "content": item}]} if isinstance(item, str) else item
    if not isinstance(body, dict):
        raise BadRequest(f"{place}: this should be a text or a body of /v1/chat/completions.")
    try:
        msgspec.json.encode(body)  # half of a surrogate pair could not be sent
        return to_request(ChatBody.model_validate({**body, "model": model}))
    except ValidationError as error:
        raise BadRequest(f"{place}: {validation_error(error, body).message}") from None
    except (ValueError, TypeError, RecursionError) as error:  # YAML has more than JSON
        raise BadRequest(f"{place}: {error}") from None


async def _recorded(spec: ModelSpec, requests: list[GenerateRequest]) -> list[Entry]:
    """One transcript entry for each request, in order.

    A model that this server runs is recorded as it writes, a model on another server in words.
    """
    pool = Pool([spec])
    variable = spec.upstream.api_key_env if spec.upstream else None
    key = os.environ.get(variable) if variable else None
    await pool.start()
    try:
        entries = []
        for request in requests:
            entries.append(without_keys(await _entry(pool, request), [key or ""]))
            _show(entries[-1])
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
    mlx-server replay record smollm2-135m --requests q.yaml --output answers.yaml
    mlx-server replay record llama3.2 --upstream http://127.0.0.1:11434/v1
    mlx-server replay record openai/gpt-oss-120b --requests q.yaml \\
        --upstream https://openrouter.ai/api/v1 --api-key-env OPENROUTER_API_KEY

    Without --requests this server starts, with all its endpoints. It passes on what an app asks of
    MODEL, and adds each answer to the transcript as the app gets it, until Ctrl-C.

    A model that another server has is recorded as the endpoints give its answers: read, repaired
    and asked for again.

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
        if output.exists() and not output.is_file():  # such as a pipe
            output.write_text(text, "utf-8")
        else:
            mode = output.stat().st_mode & 0o777 if output.exists() else 0o644
            replace_file(output, text.encode(), mode)
    else:
        print(text, end="")


def _transcript(
    model: str, requests: Path, config: Path | None, upstream: str | None, api_key_env: str | None
) -> str:
    if upstream is None:
        spec = spec_named(config, model)
    else:
        spec = model_spec(model, upstream_model(model, upstream, api_key_env))
    return written(asyncio.run(_recorded(spec, read_requests(requests, spec.id))))


def _show(entry: dict[str, Any]) -> None:
    size = len(entry["output"]) if "output" in entry else len(str(entry["answer"]))
    print(f"{entry['match'][:40]!r}: {size} characters", file=sys.stderr)
