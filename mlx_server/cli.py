"""The command line: flags in, exit code out. Each command's work is done elsewhere."""

import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_server import __version__
from mlx_server.errors import BadRequest, ServerError, SettingsError

if TYPE_CHECKING:  # what a command needs is imported inside of it, so that --help is quick
    from mlx_server.chat import Chat, Delta

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What could make a terminal do things that no text should."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # its tracebacks may show local variables, keys among them
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-server {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit.")
    ] = False,
) -> None:
    """Serve language models on this machine, with the OpenAI API.

    \b
    mlx-server serve                         serve what models.yaml lists, or a small demo
    mlx-server chat                          talk to it
    mlx-server doctor                        is this machine fit, and is models.yaml right?
    """


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
    from mlx_server.models_yaml import load_settings

    overrides = {
        "host": host,
        "port": port,
        "api_keys": tuple(api_key) if api_key else None,
        "concurrency": concurrency,
        "log_level": log_level,
        "log_format": log_format,
    }
    settings = load_settings(config, models=models or (), overrides=overrides)
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
    from mlx_server.chat import Chat, ask, connected

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

    from mlx_server.chat import converse
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

    from mlx_server.doctor import as_json, examine, report
    from mlx_server.trial import try_out

    show = as_json if json else report
    if not show(chain(examine(config), try_out()), Console()):
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
        bool, typer.Option("--markdown", help="These as README.md has them.")
    ] = False,
) -> None:
    """Show the models of a running server: what is loaded, who uses it, what it takes.

    \b
    mlx-server models
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
    from mlx_server.chat import client_of, key_at_home
    from mlx_server.pool_table import pool_of, show

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

    from mlx_server.adapters_table import rows_of, show
    from mlx_server.models_yaml import load_settings

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

    from mlx_server.models_yaml import load_settings
    from mlx_server.store_table import look, show

    show(look(load_settings(config), prune=prune), Console())


@app.command()
def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of any server of the OpenAI API.")],
    model: Annotated[
        str | None, typer.Option(help="Its id; the first that is served if left out.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="If it wants one.")] = None,
    concurrency: Annotated[
        str, typer.Option(metavar="LIST", help="How many clients ask at once.")
    ] = "1,4,8,16",
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LIST", help="Lengths of the prompts.")
    ] = "64,512",
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of the answers.")] = 64,
    requests: Annotated[
        int | None, typer.Option(min=1, help="For each line [2 a client, at least 4].")
    ] = None,
    shared_prefix: Annotated[
        bool, typer.Option("--shared-prefix", help="Prompts begin alike, for prefix caches.")
    ] = False,
    completions: Annotated[
        bool, typer.Option("--completions", help="Ask /v1/completions, with no chat template.")
    ] = False,
) -> None:
    """Measure a server: time to first token, time to each next one, tokens a second.

    \b
    mlx-server bench http://127.0.0.1:8000
    mlx-server bench http://studio.local:8000/v1 --api-key KEY --model qwen3
    mlx-server bench http://127.0.0.1:8000 --concurrency 1,32 --prompt-tokens 2000
    mlx-server bench http://127.0.0.1:8000 --shared-prefix | tee warm.txt

    The prompts are made of random words, sampling is greedy. The exit code is 0 if no request
    failed, else 1.
    """
    from rich.console import Console

    from mlx_server.bench import measure, numbers, target_of
    from mlx_server.bench.report import report

    clients = numbers("--concurrency", concurrency)
    lengths = numbers("--prompt-tokens", prompt_tokens)
    target = target_of(url, api_key, model, "completions" if completions else "chat")
    results = measure(target, clients, lengths, max_tokens, requests, shared_prefix=shared_prefix)
    if not report(results, Console()):
        raise typer.Exit(1)


replay = typer.Typer(help="Recorded answers, for tests without weights.", no_args_is_help=True)
app.add_typer(replay, name="replay")


@replay.command()
def record(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="An id of models.yaml, a folder or a hub id.")
    ],
    requests: Annotated[
        Path, typer.Option(metavar="FILE", help="YAML list or JSON Lines of texts or requests.")
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The transcript [standard output].")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rather than ./models.yaml.")
    ] = None,
) -> None:
    """Have a real model answer requests, and write what it said as a transcript.

    \b
    mlx-server replay record smollm2-135m --requests questions.yaml --output answers.yaml

    A request is a text, or a body as /v1/chat/completions takes it. The transcript is then served
    with `source: replay:answers.yaml` and the model's `family:` in models.yaml.
    """
    import yaml

    from mlx_server.app import spec_named
    from mlx_server.record import read_requests
    from mlx_server.record import record as recorded

    spec = spec_named(config, model)
    entries = recorded(
        spec,
        read_requests(requests, spec.id),
        lambda entry: print(
            f"{entry['match'][:40]!r}: {len(entry['output'])} characters", file=sys.stderr
        ),
    )
    text = yaml.safe_dump(entries, allow_unicode=True, sort_keys=False, width=100)
    if output:
        output.write_text(text, "utf-8")
    else:
        print(text, end="")


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
