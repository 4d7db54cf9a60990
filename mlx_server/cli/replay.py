"""`mlx-server replay record`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import ConfigFile, app

replay = typer.Typer(help="Recorded answers, for tests without weights.", no_args_is_help=True)
app.add_typer(replay, name="replay")


@replay.command()
def record(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Id from models.yaml, folder or hub id.")
    ],
    requests: Annotated[
        Path, typer.Option(metavar="FILE", help="YAML list or JSON Lines of requests.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the transcript here [standard output]."),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Record a real model's answers to requests as a transcript.

    \b
    mlx-server replay record smollm2-135m --requests questions.yaml --output answers.yaml

    A request is a text or a body of /v1/chat/completions. To serve the transcript, set `source:
    replay:answers.yaml` and the model's `family:` in models.yaml.
    """
    import yaml

    from mlx_server.cli.recording import read_requests
    from mlx_server.cli.recording import record as recorded
    from mlx_server.config.specs import spec_named

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
