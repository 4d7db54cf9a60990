"""`mlx-server chat`."""

import select
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from mlx_server.cli.root import ServerKey, command_app
from mlx_server.cli.terminal import CONTROL, safe
from mlx_server.clients.chat import Chat, Delta, ask, connected, converse, picture_part
from mlx_server.errors import BadRequest
from mlx_server.events import ReasoningDelta, TextDelta

app = command_app()


@app.command()
def chat(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Id of the model [the first one served].")
    ] = None,
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="Ask this and end.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of the server [http://127.0.0.1:8000].")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer.")] = None,
    connector: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A connector whose tools may be used; repeat for more."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A picture for the first message; repeat for more."),
    ] = None,
    api_key: ServerKey = None,
) -> None:
    """Chat with a model in the terminal.

    \b
    mlx-server chat
    mlx-server chat qwen3 --system "Be brief." --temperature 0
    mlx-server chat --url http://studio.local:8000 --api-key KEY
    mlx-server chat --connector release-notes
    mlx-server chat qwen3 "Name three fish."
    echo "Name three fish." | mlx-server chat
    echo "What is on it?" | mlx-server chat --image screenshot.png

    If nothing listens at the default URL, a server is started for the length of the chat; MODEL may
    then also be a folder or a hub id. A pasted block is one message, a line that ends with a
    backslash goes on, and lines between triple quotes are one message too. Ctrl-C stops an answer,
    /reset starts a new conversation, /exit ends the chat.
    """
    given = {"temperature": temperature, "max_tokens": max_tokens}
    options = {name: value for name, value in given.items() if value is not None}
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not question
    question = question or ("" if in_terminal else _piped())
    pictures = [*map(picture_part, image or ())]
    with connected(url, api_key, model) as (client, model_id):
        chat = Chat(client, model_id, system, options, connector or (), pictures=pictures)
        if in_terminal:
            _converse(chat)
        else:
            ask(chat, question, _print_text)
            print()


def _piped() -> str:
    if text := sys.stdin.read().strip():
        return text
    raise BadRequest(
        'There is no question on standard input. Try: mlx-server chat MODEL "Name three fish."'
    )


def _print_text(delta: Delta) -> None:
    if isinstance(delta, TextDelta):
        text = CONTROL.sub("", delta.text) if sys.stdout.isatty() else delta.text
        print(text, end="", flush=True)


def _converse(chat: Chat) -> None:
    import readline  # noqa: F401  gives input() editing and a history

    console = Console()
    answer = MarkdownBlocks(console)

    def show(delta: Delta) -> None:
        text = CONTROL.sub("", delta.text)
        if isinstance(delta, ReasoningDelta):
            console.out(text, end="", style="dim", highlight=False)
        else:
            answer.add(text)

    def note(text: str) -> None:
        answer.end()
        console.out(safe(text), style="dim", highlight=False)

    def read() -> str:
        with _typed_text(shown=True):
            return _message()

    note(f"{chat.model}. /reset starts a new conversation, /exit ends the chat.")
    with _typed_text(shown=False):
        converse(chat, read, show, note)


PASTE_SECONDS = 0.05
"""The lines of a pasted block come within this time, those that somebody types do not."""
QUOTES = '"""'


def _message() -> str:
    """What the user types or pastes. Raises EOFError at the end of input."""
    lines = [input("> ")]
    with suppress(EOFError):
        if lines[0].startswith(QUOTES):
            while len(lines) == 1 or not lines[-1].endswith(QUOTES):
                lines.append(input())
            return "\n".join(lines).removeprefix(QUOTES).removesuffix(QUOTES)
        while lines[-1].endswith("\\") or select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            lines.append(input())
    return "\n".join(line.removesuffix("\\") for line in lines)


@contextmanager
def _typed_text(*, shown: bool) -> Iterator[None]:
    """Whether the terminal shows what is typed. While an answer runs it is kept for the next
    message and not mixed into the answer."""
    before = termios.tcgetattr(sys.stdin)
    flags = termios.ECHO | termios.ICANON
    changed = [*before]
    changed[3] = before[3] | flags if shown else before[3] & ~flags
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class MarkdownBlocks:
    """Shows Markdown as it comes: each paragraph, list or block of code is printed when it is
    complete; the one that is being written is drawn anew."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._live: Live | None = None

    def add(self, text: str) -> None:
        self._text += text
        if self._live is None:
            self._live = Live(console=self._console, transient=True, vertical_overflow="crop")
            self._live.start()
        while end := _end_of_block(self._text):
            block, self._text = self._text[:end], self._text[end:]
            self._live.update(Markdown(""))
            self._console.print(Markdown(block), "")
        self._live.update(Markdown(self._text))

    def end(self) -> None:
        if self._live:
            self._live.stop()
            self._console.print(Markdown(self._text))
            self._text, self._live = "", None


def _end_of_block(text: str) -> int:
    """Where the first complete block of the Markdown ends; 0 if none is complete."""
    fence, at = "", 0
    for line in text.splitlines(keepends=True):
        at += len(line)
        if not line.endswith("\n"):
            return 0
        stripped = line.strip()
        if fence:
            if stripped == fence:
                return at
        elif stripped.startswith(("```", "~~~")):
            fence = stripped[:3]
        elif not stripped and text[:at].strip():
            return at
    return 0
