"""The typer app of all commands. A command's module is imported when the command is run."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from mlx_server import __version__

COMMANDS = {
    "serve": "Serve models until Ctrl-C.",
    "restart": "Replace a running server by a new process, without ending an answer.",
    "init": "Write a first models.yaml, which can be served without a network.",
    "chat": "Chat with a model in the terminal.",
    "connect": "Let a coding agent or another client use this server.",
    "doctor": "Check this machine and models.yaml, and show what to fix.",
    "models": "Show a running server's models: their state, memory and use.",
    "adapters": "Show the LoRA adapters and the models that they fit.",
    "connectors": "Log in to MCP servers of models.yaml, or out.",
    "store": "Show how many responses and conversations are stored, and where.",
    "cache": "Show what the prompt cache keeps on disk, and where.",
    "batch": "Answer a file of requests, by a running server's batches.",
    "bench": "Measure a server's latency and throughput.",
    "compare": "Say how much a model's answers differ from another's.",
    "train": "Train a LoRA adapter, and publish it if it is better than its base model.",
    "pull": "Download models from the Hugging Face hub, to serve them offline.",
    "replay": "Record answers, for tests without weights.",
    "service": "Keep a server running, from login to logout.",
}
"""Each is the name of a module with an `app`. The texts are those of their help, which is shown
without importing them."""


class CommandGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *(name for name in self.commands if name not in COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            module = import_module(f"mlx_server.cli.{cmd_name}")
            self.add_command(typer.main.get_command(module.app), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS:
            for name in COMMANDS:  # the message suggests one of them
                self.commands.setdefault(name, TyperCommand(name))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def command_app(**options: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,  # its tracebacks may show local variables, keys among them
        **options,
    )


app = command_app(no_args_is_help=True, cls=CommandGroup)

ConfigFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Read this file instead of ./models.yaml.")
]
ServerUrl = Annotated[str, typer.Option(help="URL of the server.")]
ServerKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="Key [here the first of MLX_SERVER_API_KEYS].")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-server {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve language models on this machine through the OpenAI API.

    \b
    mlx-server serve                        serve models.yaml, or a small demo
    mlx-server chat                         chat with a model
    mlx-server connect codex --write --run  let a coding agent use this server
    mlx-server doctor                       check this machine and models.yaml
    """
