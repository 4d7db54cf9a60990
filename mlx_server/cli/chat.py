"""`mlx-server chat`."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from mlx_server.cli.root import command_app
from mlx_server.cli.terminal import CONTROL, safe
from mlx_server.clients.chat import Chat, Delta, ask, connected, converse
from mlx_server.errors import BadRequest
from mlx_server.events import ReasoningDelta, TextDelta

app = command_app()


@app.command()
def chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Id of the model [the first one served]."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of the server [http://127.0.0.1:8000].")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer.")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key [the first of MLX_SERVER_API_KEYS].")
    ] = None,
) -> None:
    """Chat with a model in the terminal.

    \b
    mlx-server chat
    mlx-server chat qwen3 --system "Be brief." --temperature 0
    mlx-server chat --url http://studio.local:8000 --api-key KEY
    echo "Name three fish." | mlx-server chat

    If nothing listens at the default URL, a server is started for the length of the chat; MODEL may
    then also be a folder or a hub id. Ctrl-C stops an answer, /reset starts a new conversation,
    /exit ends the chat.
    """
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


def _print_text(delta: Delta) -> None:
    if isinstance(delta, TextDelta):
        text = CONTROL.sub("", delta.text) if sys.stdout.isatty() else delta.text
        print(text, end="", flush=True)


def _converse(chat: Chat) -> None:
    import readline  # noqa: F401  gives input() editing and a history

    console = Console()

    def show(delta: Delta) -> None:
        style = "dim" if isinstance(delta, ReasoningDelta) else None
        console.out(CONTROL.sub("", delta.text), end="", style=style, highlight=False)

    def note(text: str) -> None:
        console.out(safe(text), style="dim", highlight=False)

    note(f"{chat.model}. /reset starts a new conversation, /exit ends the chat.")
    converse(chat, lambda: input("> "), show, note)
