"""Answers with drafts and without: see scripts/drafts."""

import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import mlx.core as mx

from mlx_server.sources.demo import demo_checkpoint
from mlx_server.worker import ragged_caches
from tests.tiny import TOKENS, tiny_llama
from tests.worker.kinds import KINDS, Kind
from tests.worker.lora_files import linears_of, mlx_adapter
from tests.worker.speculation.drafting_ranks import RING, ring_outcome
from tests.worker.speculation.mixed_requests import Model, Outcome, drafted_run, seeing_model
from tests.worker.test_architectures import ADAPTED, ALONE

EIGHT_BITS = ("llama", "qwen3_moe", "qwen3_5")
SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma3")

Compared = Callable[[Path, Path, int, int], Outcome]
"""Of a new folder, a tokenizer, a seed and a number of conversations."""


def tiny(
    kind: Kind, folder: Path, tokenizer: Path, seed: int, count: int, bits: int | None = None
) -> Outcome:
    model = Model(kind.save(folder / "m"), TOKENS, tokenizer, bits)
    linears = [name for name in linears_of(model.path) if name.endswith(ADAPTED)]
    linears = [name for name in linears if "index" not in name]
    if linears and not bits:
        model.adapters["a"] = mlx_adapter(folder / "a", model.path, keys=linears)
    return drafted_run(model, seed, count).outcome


def with_pictures(family: str, folder: Path, tokenizer: Path, seed: int, count: int) -> Outcome:
    return drafted_run(seeing_model(family, folder, tokenizer), seed, count).outcome


def demo(folder: Path, tokenizer: Path, seed: int, count: int) -> Outcome:
    """In float32, since half precision rounds sums of other shapes otherwise."""
    checkpoint, path = demo_checkpoint(lambda *progress: None), folder / "demo"
    shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in checkpoint.glob("*.safetensors"):
        weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
        mx.save_safetensors(str(path / file.name), weights, {"format": "mlx"})
    return drafted_run(Model(path, 49_152, path), seed, count).outcome


def models() -> Iterator[tuple[str, Compared]]:
    kinds = {name: kind for name, kind in KINDS.items() if name not in ALONE}
    yield from ((name, partial(tiny, kind)) for name, kind in kinds.items())
    yield from ((f"{name} in 8 bits", partial(tiny, kinds[name], bits=8)) for name in EIGHT_BITS)
    yield from ((f"{name} with pictures", partial(with_pictures, name)) for name in SEEING)
    yield from (
        (f"{name} on 2 ranks, {mode}", partial(ring_outcome, mode, name)) for mode, name in RING
    )
    yield "demo", demo


def compared(names: Iterable[str], requests: int, seed: int) -> Outcome:
    chosen = {name: model for name, model in models() if not names or name in names}
    left, total = requests, Outcome(0, 0, 0.0, 0, 0)
    for at, (name, model) in enumerate(chosen.items()):
        with TemporaryDirectory() as folder, patch.object(ragged_caches, "SPARE", 8):
            tokenizer = tiny_llama(Path(folder) / "tokenizer")
            conversations = max(1, round(left / (len(chosen) - at) / 2))
            outcome = model(Path(folder), tokenizer, seed + at, conversations)
        print(f"{name:32}", line(outcome), flush=True)
        left -= outcome.requests
        total = Outcome(
            total.requests + outcome.requests,
            total.differing + outcome.differing,
            max(total.distance, outcome.distance),
            total.sent + outcome.sent,
            total.held + outcome.held,
        )
        mx.clear_cache()
    print(f"{'all':32}", line(total))
    return total


def line(outcome: Outcome) -> str:
    requests, differing, distance, sent, held = outcome
    return (
        f"{requests:5} requests, {differing} differ, log probabilities by {distance:.1e},"
        f" {held} of {sent} drafted tokens held"
    )


if __name__ == "__main__":
    parser = ArgumentParser("scripts/drafts")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    sys.exit(compared(given.names, given.requests, given.seed).differing > 0)
