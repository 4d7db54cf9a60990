"""`mlx-server replay record`."""

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_server.cli.root import ConfigFile, app
from mlx_server.system.own_files import own_path

if TYPE_CHECKING:
    from mlx_server.cli.upstream_recording import RecordedServer

replay = typer.Typer(help="Record answers, for tests without weights.", no_args_is_help=True)
app.add_typer(replay, name="replay")


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


@replay.command()
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
        from mlx_server.cli.live_recording import serve_recorded

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
    from mlx_server.api.transcript_recorder import written
    from mlx_server.cli.recording import read_requests, record_upstream
    from mlx_server.cli.recording import record as recorded
    from mlx_server.config.specs import spec_named

    if upstream is not None:
        server = _server(upstream, model, api_key_env)
        return written(record_upstream(server, read_requests(requests, model), _show))
    spec = spec_named(config, model)
    asked = [request for _, request in read_requests(requests, spec.id)]
    return written(recorded(spec, asked, _show))


def _server(url: str, model: str, api_key_env: str | None) -> "RecordedServer":
    from mlx_server.cli.upstream_recording import RecordedServer
    from mlx_server.errors import SettingsError

    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        raise SettingsError(f"The environment variable {api_key_env} has no key. Set it first.")
    return RecordedServer(url, model, key)


def _show(entry: dict[str, Any]) -> None:
    size = len(entry["output"]) if "output" in entry else len(str(entry["answer"]))
    print(f"{entry['match'][:40]!r}: {size} characters", file=sys.stderr)
