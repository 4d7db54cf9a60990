"""`mlx-server doctor`, with the check that the engine starts here and a model loads."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from itertools import chain
from json import dumps
from pathlib import Path
from statistics import mean
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from mlx_server.cli.machine_checks import Check, examine
from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.terminal import printable
from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import model_specs
from mlx_server.engine.client import EngineClient
from mlx_server.engine.comparison import Answers, ComparisonJob, Side, findings
from mlx_server.engine.messages import LoadModel
from mlx_server.errors import ServerError, public_message
from mlx_server.generation.training import public_tokens
from mlx_server.pool.prepare import REPLAY, ModelSpec, capabilities_on_disk, prepare
from mlx_server.sources.demo import made_checkpoint
from mlx_server.system.files import replace_file

app = command_app()


@app.command()
def doctor(
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quality: Annotated[
        bool, typer.Option("--quality", help="Check also that models compute what they did.")
    ] = False,
) -> None:
    """Check this machine and models.yaml, and show what to fix.

    \b
    mlx-server doctor
    mlx-server doctor --config team.yaml
    mlx-server doctor --json > report.json
    mlx-server doctor --quality

    Please add the output to bug reports; it shows no key. The exit code is 0 if nothing failed,
    else 1.
    """
    show = as_json if json else report
    if not show(
        chain(examine(config), run_engine_check(), quality_checks(config) if quality else ()),
        Console(),
    ):
        raise typer.Exit(1)


COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def report(checks: Iterable[Check], console: Console) -> bool:
    """Prints each check as soon as it is done. Returns whether nothing failed."""
    is_good = True
    for check in checks:
        fix = f" -> {check.fix}" if check.fix else ""
        status = (f"{check.status:<5}", COLOURS[check.status])
        line = Text.assemble(status, printable(f"{check.name:<10}{check.found}{fix}"))
        console.print(line, soft_wrap=True)
        is_good = is_good and check.status != "fail"
    return is_good


def as_json(checks: Iterable[Check], console: Console) -> bool:
    """Like `report`, but prints JSON."""
    results = [asdict(check) for check in checks]
    console.out(dumps(results, indent=2), highlight=False)
    return all(check["status"] != "fail" for check in results)


REPORT = "please report it, with the whole output of `mlx-server doctor`"


def run_engine_check() -> Iterator[Check]:
    """Loads the demo model, if it has been made already: the doctor downloads nothing."""
    return iter(asyncio.run(_engine_checks()))


async def _engine_checks() -> list[Check]:
    engine, began = EngineClient(), time.perf_counter()
    try:
        await engine.start()
        checks = [Check("ok", "engine", f"starts in {time.perf_counter() - began:.1f} s")]
        return [*checks, await _demo(engine)]
    except (ServerError, OSError) as error:
        return [Check("fail", "engine", public_message(error), REPORT)]
    finally:
        await engine.stop()


async def _demo(engine: EngineClient) -> Check:
    if (folder := made_checkpoint()) is None:
        return Check("ok", "demo", "not made yet: the first `mlx-server serve` without models does")
    try:
        loaded = await engine.load(LoadModel("demo", str(folder)), lambda *_: None)
    except ServerError as error:
        return Check("fail", "demo", error.message, f"{REPORT}, or delete the model from the cache")
    return Check("ok", "demo", f"loads, {loaded.nbytes / 1e6:.0f} MB")


QUALITY = "quality"
"""A folder in the data directory: what each model computed when it was checked first."""

MOST_ROUNDING = 4
"""Times what rounding changes that a model may differ from then."""


class Fingerprint(msgspec.Struct):
    versions: str
    files: str
    """The stamp of the model's."""
    logprobs: Sequence[Sequence[float]]
    """The log probabilities of the tokens of fixed texts."""
    noise: float


def quality_checks(config: Path | None) -> Iterator[Check]:
    """Compares how likely each model that is on this machine finds fixed texts with how likely it
    found them when it was checked first, perhaps with other versions of MLX."""
    settings = load_settings(config)
    for spec in model_specs(settings):
        facts = None if spec.upstream else capabilities_on_disk(spec)
        if facts and facts.task == "generate" and not spec.source.startswith(REPLAY):
            assert settings.store.data_dir
            try:
                yield _quality(spec, settings.store.data_dir / QUALITY)
            except ServerError as error:
                yield Check("fail", "quality", f"{spec.id}: {error.message}", REPORT)


def _quality(spec: ModelSpec, folder: Path) -> Check:
    prepared = prepare(spec, lambda *progress: None, upcast=False)
    side = Side(checkpoint=str(prepared.path), kv_bits=spec.kv_bits)
    job = ComparisonJob(sides=(side,), prompts=public_tokens(prepared), tokens=0)
    (answers,) = (each for each in findings(job) if isinstance(each, Answers))
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    now = Fingerprint(versions, repr(prepared.stamp), answers.logprobs, answers.noise)
    file = folder / f"{sha256(repr((spec.source, spec.kv_bits)).encode()).hexdigest()[:16]}.json"
    first = msgspec.json.decode(file.read_bytes(), type=Fingerprint) if file.is_file() else None
    if first is None or first.files != now.files:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, msgspec.json.encode(now))
        return Check("ok", "quality", f"{spec.id}: remembered, to be compared after an upgrade")
    texts = zip(first.logprobs, now.logprobs, strict=True)
    moved = mean(abs(a - b) for text in texts for a, b in zip(*text, strict=True))
    found = f"{spec.id}: differs by {moved:.2g} nats a token from {first.versions}"
    if moved <= MOST_ROUNDING * max(first.noise, now.noise):
        return Check("ok", "quality", f"{found}, by rounding alone")
    return Check(
        *("fail", "quality", f"{found}; rounding explains {max(first.noise, now.noise):.2g}"),
        f"compare by `mlx-server compare` and report it; to take it as it is, delete {file}",
    )
