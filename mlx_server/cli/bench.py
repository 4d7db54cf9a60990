"""`mlx-server bench`."""

from typing import Annotated

import typer
from rich.console import Console

from mlx_server.cli.root import command_app
from mlx_server.clients.bench import measure, numbers, report, target_of

app = command_app()


@app.command()
def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of an OpenAI-compatible server.")],
    model: Annotated[
        str | None, typer.Option(help="Id of the model [the first one served].")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key, if the server needs one.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of concurrent clients.")
    ] = "1,4,8,16",
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LIST", help="Lengths of the prompts, in tokens.")
    ] = "64,512",
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of an answer.")] = 64,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests per line [2 per client, at least 4].")
    ] = None,
    shared_prefix: Annotated[
        bool, typer.Option("--shared-prefix", help="Start all prompts with the same words.")
    ] = False,
    completions: Annotated[
        bool, typer.Option("--completions", help="Use /v1/completions, with no chat template.")
    ] = False,
) -> None:
    """Measure a server's latency and throughput.

    \b
    mlx-server bench http://127.0.0.1:8000
    mlx-server bench http://studio.local:8000/v1 --api-key KEY --model qwen3
    mlx-server bench http://127.0.0.1:8000 --concurrency 1,32 --prompt-tokens 2000
    mlx-server bench http://127.0.0.1:8000 --shared-prefix | tee warm.txt

    The prompts are random words, and sampling is greedy. TTFT is the median time to the first
    token, ITL that between tokens. --shared-prefix measures prefix caches. The exit code is 0 if no
    request failed, else 1.
    """
    clients = numbers("--concurrency", concurrency, 4096)
    lengths = numbers("--prompt-tokens", prompt_tokens, 4_000_000)
    target = target_of(url, api_key, model, "completions" if completions else "chat")
    results = measure(target, clients, lengths, max_tokens, requests, shared_prefix=shared_prefix)
    if not report(results, Console()):
        raise typer.Exit(1)
