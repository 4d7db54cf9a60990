"""Runs the parts one after another, each against a limit of time, and prints one JSON object."""

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from gpu_parts import models
from gpu_parts.runs import answers, bits, first_token_beside, forever, tokens_per_second
from mlx_server.worker.costs import products_of, this_chip
from mlx_server.worker.kernels import Chip, device, recommended_bytes, time_of

ROOT = Path(__file__).parents[2]
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
"""The rows of a pass whose time is measured."""
EXACT = ("experts", "float32"), ("dense", "float32"), ("dense", "affine4"), ("experts", "mxfp4")
"""The models of which deterministic rows are compared by bits."""
TEST_SECONDS = 150

Part = Callable[[bool, float], Any]
PARTS: dict[str, Part] = {}


def part(function: Part) -> Part:
    PARTS[function.__name__] = function
    return function


@part
def machine(small: bool, seconds: float) -> Any:
    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "numpy")
    return {
        "device": device(),
        "default": str(mx.default_device()),
        "info": {name: str(value) for name, value in mx.device_info().items()},
        "recommended_bytes": recommended_bytes(),
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "packages": {name: of(name) for name in packages if of(name)},
    }


@part
def batch_against_alone(small: bool, seconds: float) -> Any:
    """How many greedy tokens differ between a row alone and in company, and the largest difference
    of a logit after the same prompt, by precision, size of the batch and model."""
    most = 2 if small else 16
    return {
        f"{kind} {precision}": _tried(_differences, models.network(kind, precision, True), most)
        for kind in ("dense", "experts")
        for precision in models.PRECISIONS
    }


def _tried(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, or its error: one combination that a device lacks ends no part."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _differences(network: Any, most: int) -> dict[str, Any]:
    prompts = [models.prompt(24, seed) for seed in range(most)]
    alone = [answers(network, [prompt], tokens=16)[0] for prompt in prompts]
    logits = [network(mx.array([prompt]))[0, -1].astype(mx.float32) for prompt in prompts]
    found = {}
    for rows in (rows for rows in (2, 4, 8, 16) if rows <= most):
        together = answers(network, prompts[:rows], tokens=16)
        batched = network(mx.array(prompts[:rows]))[:, -1].astype(mx.float32)
        found[str(rows)] = {
            "different_answers": sum(a != b for a, b in zip(alone, together, strict=False)),
            "logit": float(mx.abs(batched - mx.stack(logits[:rows])).max()),
        }
    return found


@part
def deterministic(small: bool, seconds: float) -> Any:
    """How many of three rows have other bits than alone: 0 if they are deterministic. Beside it the
    same for rows that are not."""
    prompts = [models.prompt(length, length) for length in (7, 60, 200)]
    return {
        f"{kind} {precision}": {
            "deterministic": _tried(bits, network, prompts, True),
            "others": _tried(bits, network, prompts, False),
        }
        for kind, precision in (EXACT[:1] if small else EXACT)
        for network in [models.network(kind, precision, small)]
    }


@part
def cost_curve(small: bool, seconds: float) -> Any:
    """Milliseconds of a pass by its rows, and by the tokens of one prompt, the least of five; and
    how many times as long as one row they take, by MLX's kernels on this chip and on Macs."""
    return {
        f"{kind} {precision}": _tried(_curve, models.network(kind, precision, small))
        for kind, precision in (("dense", "float16"), ("dense", "affine4"), ("experts", "mxfp4"))
    }


def _curve(network: Any) -> dict[str, dict[str, float]]:
    measured = {
        shape: {str(n): _milliseconds(network, n, shape) for n in ROWS}
        for shape in ("rows", "tokens")
    }
    chips = {"here": this_chip(), "m2": Chip(14), "m4": Chip(16)}
    products = products_of(network)
    return measured | {
        name: {str(n): round(time_of(products, n, c) / time_of(products, 1, c), 2) for n in ROWS}
        for name, c in chips.items()
    }


def _milliseconds(network: Any, count: int, shape: str) -> float:
    tokens = mx.zeros((count, 1) if shape == "rows" else (1, count), mx.int32)
    times = []
    for _ in range(6):  # the first one compiles
        began = time.perf_counter()
        mx.eval(network(tokens))
        times.append(time.perf_counter() - began)
    return round(min(times[1:]) * 1000, 3)


@part
def throughput(small: bool, seconds: float) -> Any:
    """Tokens a second of this engine and of mlx-lm's batch generator, in turns."""
    found: dict[str, Any] = {}
    for kind, precision in (("dense", "affine4"), ("experts", "affine4")):
        network = models.network(kind, precision, small)
        for rows in (1, 4, 8, 16, 32):
            prompts = [models.prompt(64, seed) for seed in range(rows)]
            name = f"{kind} {precision} {rows}"
            found[name] = _tried(tokens_per_second, network, prompts, 64)
    return found


def _fast(small: bool) -> str:
    return "float32" if small else "affine4"  # a CPU is slow with other precisions


@part
def first_token(small: bool, seconds: float) -> Any:
    """The first token of a prompt alone and beside a decoding row, and that row's longest gap."""
    network = models.network("dense", _fast(small), small)
    return first_token_beside(network, models.prompt(500 if small else 4000, 1))


@part
def soak(small: bool, seconds: float) -> Any:
    """Mixed rows without a pause: whether all end, and whether memory grows."""
    return forever(models.network("dense", _fast(small), small), seconds)


@part
def tests(small: bool, seconds: float) -> Any:
    """The worker's tests, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/worker"]
    command += ["-m", "not slow", "--ignore=tests/worker/ranks", "--maxfail=25"]
    try:
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired as expired:
        lines = (expired.stdout or b"").decode(errors="replace").splitlines()
        return {"ended": f"stopped after {TEST_SECONDS} s", "last": lines[-5:]}
    lines = run.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": run.returncode, "failed": failed, "last": lines[-1:]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check")
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--seconds", type=float, default=60, help="of the soak")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="this one only")
    chosen = parser.parse_args()
    report: dict[str, Any] = {}
    for name in chosen.part or PARTS:
        began = time.perf_counter()
        sys.stderr.write(f"{name} ...\n")
        try:
            outcome = {"ok": True, "result": PARTS[name](chosen.small, chosen.seconds)}
        except Exception as error:
            trace = traceback.format_exc(limit=-3)
            outcome = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": trace}
        report[name] = {**outcome, "seconds": round(time.perf_counter() - began, 1)}
        mx.clear_cache()
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    sys.exit(not all(each["ok"] for each in report.values()))


if __name__ == "__main__":
    main()
