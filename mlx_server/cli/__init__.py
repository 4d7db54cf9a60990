"""The command line: flags in, exit code out. Each command's work is done elsewhere."""

import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_server.cli.root import app
from mlx_server.errors import BadRequest, ServerError, SettingsError

if TYPE_CHECKING:  # what a command needs is imported inside of it, so that --help is quick
    from mlx_server.clients.chat import Chat, Delta

__all__ = ["app", "main"]

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What could make a terminal do things that no text should."""


@app.command()
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH_OR_ID", help="Folders or hub ids to serve."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rather than ./models.yaml.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="0: any free one [8000].")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A key that clients may use; again for more."),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Answers decoded together [16].")] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error [info].")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json [text].")] = None,
    log_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write everything there; rotated at 10 MB."),
    ] = None,
    discover: Annotated[
        bool, typer.Option("--discover", help="Offer all models that `models --local` finds, too.")
    ] = False,
) -> None:
    """Serve models until Ctrl-C.

    \b
    mlx-server serve
    mlx-server serve ./models/qwen3 mlx-community/Llama-3.2-1B-Instruct-4bit
    mlx-server serve --config team.yaml --port 9000
    MLX_SERVER_API_KEYS=secret mlx-server serve --host 0.0.0.0

    Without PATH_OR_ID it serves what models.yaml lists; without that file, a small demo model.
    MLX_SERVER_HOST, MLX_SERVER_PORT, MLX_SERVER_API_KEYS (comma separated; other users of this
    machine can see the flag) and MLX_SERVER_CONFIG set the same.
    """
    from mlx_server.system import logs

    logs.configure("info", "json" if log_format == "json" else "text")  # for errors of imports, too
    from mlx_server.config.models_yaml import load_settings

    overrides = {
        "host": host,
        "port": port,
        "api_keys": tuple(api_key) if api_key else None,
        "concurrency": concurrency,
        "log_level": log_level,
        "log_format": log_format,
    }
    if log_file:
        from mlx_server.system.log_file import write_to

        write_to(log_file)
    settings = load_settings(config, models=models or (), overrides=overrides)
    if discover:
        from mlx_server.cli.discovery import with_local_models

        settings = with_local_models(settings)
    if models:
        from mlx_server.cli.startup import check_named

        check_named(settings, models)
    from mlx_server.app import run

    run(settings)


@app.command()
def chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Its id; the first that is served if left out."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="The server [http://127.0.0.1:8000].")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="[the first of MLX_SERVER_API_KEYS]")
    ] = None,
) -> None:
    """Talk to a model in the terminal.

    \b
    mlx-server chat
    mlx-server chat qwen3 --system "Be brief." --temperature 0
    mlx-server chat --url http://studio.local:8000 --api-key KEY
    echo "Name three fish." | mlx-server chat

    When nothing listens at the default url, a server is started for the length of the chat; MODEL
    may then be a folder or a hub id, too. Ctrl-C stops an answer; /reset starts anew; /exit ends.
    """
    from mlx_server.clients.chat import Chat, ask, connected

    given = {"temperature": temperature, "max_tokens": max_tokens}
    options = {name: value for name, value in given.items() if value is not None}
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    question = "" if in_terminal else _piped()
    with connected(url, api_key, model) as (client, model_id):
        chat = Chat(client, model_id, system, options)
        if in_terminal:
            _converse(chat)
        else:
            ask(chat, question, _print_text)
            print()


def _piped() -> str:
    if text := sys.stdin.read().strip():
        return text
    raise BadRequest('There is no question on standard input. Try: echo "hi" | mlx-server chat')


def _print_text(delta: "Delta") -> None:
    from mlx_server.events import TextDelta

    if isinstance(delta, TextDelta):
        print(delta.text, end="", flush=True)


def _converse(chat: "Chat") -> None:
    import readline  # noqa: F401  gives input() editing and a history

    from rich.console import Console

    from mlx_server.clients.chat import converse
    from mlx_server.events import ReasoningDelta

    console = Console()

    def show(delta: "Delta") -> None:
        style = "dim" if isinstance(delta, ReasoningDelta) else None
        console.out(CONTROL.sub("", delta.text), end="", style=style, highlight=False)

    def note(text: str) -> None:
        console.out(text, style="dim", highlight=False)

    note(f"{chat.model}. /reset starts anew, /exit ends.")
    converse(chat, lambda: input("> "), show, note)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rather than ./models.yaml.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check this machine and models.yaml, and say what to do: what a bug report needs.

    \b
    mlx-server doctor
    mlx-server doctor --config team.yaml
    mlx-server doctor --json > report.json
    mlx-server doctor | grep fail

    It shows no key. The exit code is 0 if nothing failed, else 1.
    """
    from itertools import chain

    from rich.console import Console

    from mlx_server.cli.engine_check import run_engine_check
    from mlx_server.cli.machine_checks import as_json, examine, report

    show = as_json if json else report
    if not show(chain(examine(config), run_engine_check()), Console()):
        raise typer.Exit(1)


@app.command()
def models(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="[the first of MLX_SERVER_API_KEYS]")
    ] = None,
    families: Annotated[
        bool, typer.Option("--families", help="The model families that are known, instead.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The families as a table in Markdown.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="The checkpoints on this machine, instead.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of which --local takes the memory budget."),
    ] = None,
) -> None:
    """Show the models of a running server: what is loaded, who uses it, what it takes.

    \b
    mlx-server models
    mlx-server models --local
    mlx-server models --url http://studio.local:8000 --api-key KEY
    mlx-server models --families
    """
    from rich.console import Console

    if markdown:
        from mlx_server.families.table import markdown as table

        print(table(), end="")
        return
    if families:
        from mlx_server.families.table import show as show_families

        show_families(Console())
        return
    if local:
        from mlx_server.cli.tables.local import show as show_local
        from mlx_server.config.models_yaml import load_settings
        from mlx_server.pool.memory_budget import budget_of
        from mlx_server.sources.local import local_models

        budget = budget_of(load_settings(config).server.memory_budget, None).nbytes
        show_local(list(local_models(upcast=sys.platform != "darwin")), budget, Console())
        return
    from mlx_server.cli.tables.pool import pool_of, show
    from mlx_server.clients.chat import client_of, key_at_home

    with client_of(url, api_key or key_at_home()) as client:
        show(pool_of(client), Console())


@app.command()
def adapters(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rather than ./models.yaml.")
    ] = None,
) -> None:
    """Show the LoRA adapters, which models they fit, and what is wrong with those that fit none.

    \b
    mlx-server adapters
    mlx-server adapters --config team.yaml

    They come from the folder `adapters` beside models.yaml and from `adapters:` of its models. A
    `?` marks models that are not on this machine. The exit code is 0 if all can be served, else 1.
    """
    from rich.console import Console

    from mlx_server.cli.tables.adapters import rows_of, show
    from mlx_server.config.models_yaml import load_settings

    if not show(rows_of(load_settings(config)), Console()):
        raise typer.Exit(1)


@app.command()
def store(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rather than ./models.yaml.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what is too old or too much, first.")
    ] = False,
) -> None:
    """Show what is stored of responses and conversations, and where.

    \b
    mlx-server store
    mlx-server store --prune
    MLX_SERVER_DATA=/srv/mlx mlx-server store

    How long and how many are kept is set under `store` in models.yaml; a server prunes by itself,
    once an hour. This works beside a running one, too.
    """
    from rich.console import Console

    from mlx_server.cli.tables.store import look, show
    from mlx_server.config.models_yaml import load_settings

    show(look(load_settings(config), prune=prune), Console())


from mlx_server.cli import bench, pull, replay, service  # noqa: E402, F401  in the order of --help


def main() -> None:
    """Exit codes: 1 an error, 2 wrong settings or flags, 130 Ctrl-C."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="mlx-server")
    except ServerError as error:
        print(error.message, file=sys.stderr)
        sys.exit(2 if isinstance(error, SettingsError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
