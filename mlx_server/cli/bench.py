"""`mlx-server bench`."""

from typing import Annotated

import typer

from mlx_server.cli.root import app


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

    from mlx_server.clients.bench import measure, numbers, target_of
    from mlx_server.clients.bench.report import report

    clients = numbers("--concurrency", concurrency)
    lengths = numbers("--prompt-tokens", prompt_tokens)
    target = target_of(url, api_key, model, "completions" if completions else "chat")
    results = measure(target, clients, lengths, max_tokens, requests, shared_prefix=shared_prefix)
    if not report(results, Console()):
        raise typer.Exit(1)
