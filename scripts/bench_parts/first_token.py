"""Measures where the time to the first token of a chat goes: the server that runs by this module
writes down when each part of it ends.

Nothing else runs meanwhile; see `scripts/bench --against` for many clients.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from bench_parts.contenders import answering
from bench_parts.models import model_folder
from bench_parts.plan import Model
from bench_parts.tables import Row

VARIABLE = "MLX_SERVER_MARKS"
"""It names the file of the marks."""

COLUMNS = ("part", "tiny, ms", "demo, ms")
PARTS = {
    "read": "the request arrives, is held to HTTP and to the server's rules",
    "check": "JSON, types and ranges",
    "prepare": "the model, its limits",
    "render": "the template, in its own process",
    "tokenise": "ids of the prompt",
    "plan": "rows, limits, memory, place in the queue",
    "prefill": "the engine takes the row and computes all but its last token",
    "sample": "the first step, its token",
    "parse": "text, events, the chunk",
    "send": "the client has it",
}
WORDS, WARM, REQUESTS = 50, 10, 60


def _serve() -> None:
    """Runs the server's command line with marks at the ends of the parts."""

    from mlx_server.api.chat_completions import routes
    from mlx_server.cli import main
    from mlx_server.engine.client import EngineClient
    from mlx_server.engine.messages import Prefilled, StepOutput
    from mlx_server.http import sse, strict_json
    from mlx_server.models.tokenizer import Tokenizer
    from mlx_server.system.sandbox.chat_template import ChatTemplate

    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND)

    def mark(part: str) -> None:
        os.write(file, f"{part} {time.monotonic_ns()}\n".encode())

    def before(owner: Any, name: str, part: Callable[..., str]) -> None:
        call = getattr(owner, name)

        @wraps(call)
        def marked(*args: Any, **options: Any) -> Any:
            if ended := part(*args):
                mark(ended)
            return call(*args, **options)

        setattr(owner, name, marked)

    def after(owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        @wraps(call)
        def marked(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            mark(part)
            return result

        setattr(owner, name, marked)

    def reported(_: object, report: object) -> str:
        if isinstance(report, StepOutput):
            return "sample" if report.tokens else ""
        return "prefill" if isinstance(report, Prefilled) else ""

    before(strict_json, "parse_request", lambda *_: "read")
    after(routes, "to_request", "check")
    before(ChatTemplate, "render_made", lambda *_: "prepare")
    after(ChatTemplate, "render_made", "render")
    after(Tokenizer, "_encoded", "tokenise")
    before(EngineClient, "_number", lambda *_: "plan")
    before(EngineClient, "_dispatch", reported)
    before(sse.EventStream, "_write", lambda *_: "parse")
    main()


def shares() -> Iterator[dict[str, float]]:
    """The milliseconds of each part, by model."""
    models: tuple[Model, ...] = ("tiny", "demo")
    for model in models:
        yield _shares(model_folder(model))


def _shares(folder: Path) -> dict[str, float]:
    with TemporaryDirectory() as own:
        marks = Path(own) / "marks"
        marks.touch()
        command = ["bench_parts.first_token", "serve", str(folder), "--log-level", "error"]
        with answering(command, folder.name, folder, {VARIABLE: str(marks)}) as (_, target):
            times = [_parts(target.url, folder.name, marks, n) for n in range(WARM + REQUESTS)]
    return {part: median(each[part] for each in times[WARM:]) for part in PARTS}


def _parts(url: str, model: str, marks: Path, number: int) -> dict[str, float]:
    os.truncate(marks, 0)
    words = f"Number {number}. " + " ".join(f"word{n * number % 97}" for n in range(WORDS))
    messages = [{"role": "user", "content": words}]
    body = {"model": model, "messages": messages, "max_tokens": 4, "stream": True}
    with httpx.Client(trust_env=False, timeout=60) as http:
        http.get(f"{url}/health")  # so that the connection is there
        began = time.monotonic_ns()
        with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            seen = [(line, time.monotonic_ns()) for line in response.iter_lines()]
    ended = next(at for line, at in seen if '"content":"' in line and '"content":""' not in line)
    return _between(began, marks.read_text().splitlines(), ended)


def _between(began: int, lines: list[str], ended: int) -> dict[str, float]:
    marked = [(part, int(at)) for part, at in (line.split() for line in lines)]
    first = dict(reversed(marked))
    first["tokenise"] = max(at for part, at in marked if part == "tokenise")
    first["parse"] = min(at for part, at in marked if part == "parse" and at > first["sample"])
    first["send"] = ended
    times, before = dict[str, float](), began
    for part in PARTS:
        at = max(first.get(part, before), before)
        times[part], before = (at - before) / 1e6, at
    return times


def rows(found: list[dict[str, float]]) -> Iterator[Row]:
    for part, what in PARTS.items():
        yield f"{part}: {what}", *(f"{each[part]:.2f}" for each in found)
    yield "all", *(f"{sum(each.values()):.1f}" for each in found)


if __name__ == "__main__":
    sys.argv[0] = "mlx-server"
    _serve()
