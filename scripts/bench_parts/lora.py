"""`python -m bench_parts.lora FOLDER`: what adapters cost a step of decoding, to load, and to keep.

The engine's batches in this process, on the checkpoint in FOLDER, with random adapters of rank 16
for all linears. Each step is measured in turns with the others, so that what else the machine does
hits all of them: the base as it is, the base with an adapter fused into it, and the base with
wrapped layers while its rows use 0, 1, 2, 4 and 8 adapters. Prints one line of JSON.
"""

import gc
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from bench_parts.inside import timed
from mlx_server.engine.messages import Generate
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch
from mlx_server.worker.lora_adapters import AdapterWeights
from mlx_server.worker.weights import loaded

ROWS = (1, 4, 8, 16)
ADAPTERS = (0, 1, 2, 4, 8)
RANK = 16
PROMPT = 32
WARM, STEPS = 5, 40


def measured(folder: Path, scratch: Path) -> dict[str, Any]:
    adapters = [_random_adapter(folder, scratch / f"{n}", n) for n in range(max(ADAPTERS))]
    base, wrapped = loaded(folder), loaded(folder)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    weights = AdapterWeights(wrapped)
    loads = [timed(partial(weights.load, f"{n}", a)) for n, a in enumerate(adapters)]
    kept = (mx.get_active_memory() - before) / len(adapters)
    _decoding(wrapped, [f"{n}" for n in range(len(adapters))])
    gc.collect()
    mx.clear_cache()
    mixed = (mx.get_active_memory() - before) / len(adapters)
    file = (adapters[0] / "adapters.safetensors").stat().st_size
    fused = _fused(folder, adapters[0])
    return {
        "load_ms": {"first": 1e3 * loads[0], "median": 1e3 * median(loads)},
        "bytes": {"file": file, "kept": kept / file, "kept_when_mixed": mixed / file},
        "steps": {str(rows): _steps(base, fused, wrapped, rows) for rows in ROWS},
    }


def _steps(base: Any, fused: Any, wrapped: Any, rows: int) -> dict[str, float]:
    """Returns the milliseconds of a step of the base; for the others, the medians of their ratios
    to it."""
    batches = {"base": _decoding(base, [None] * rows), "fused": _decoding(fused, [None] * rows)}
    for count in ADAPTERS:
        uses = [f"{row % count}" if count else None for row in range(rows)]
        if count <= rows:
            batches[f"{count} adapters"] = _decoding(wrapped, uses)
    rounds = [
        {name: timed(batch.step) for name, batch in batches.items()} for _ in range(WARM + STEPS)
    ][WARM:]
    found = {name: median(r[name] / r["base"] for r in rounds) for name in batches}
    found["base"] = 1e3 * median(r["base"] for r in rounds)
    if "8 adapters" in batches:
        found["8 over 1"] = median(r["8 adapters"] / r["1 adapters"] for r in rounds)
    return found


def _decoding(network: Any, uses: Iterable[str | None]) -> Batch:
    batch = Batch(network, concurrency=max(ROWS))
    for row, adapter in enumerate(uses):
        prompt = [(7 * row + 3 * place) % 100 + 5 for place in range(PROMPT)]
        sampling = SamplingParams(temperature=0)
        batch.add(Generate(row, "", prompt, 10_000, [], sampling, adapter=adapter))
    while batch.waiting:
        batch.step()
    return batch


def _fused(folder: Path, adapter: Path) -> Any:
    model = load_adapters(loaded(folder), str(adapter))
    layers = [(path, m.fuse()) for path, m in model.named_modules() if hasattr(m, "fuse")]
    model.update_modules(tree_unflatten(layers))
    mx.eval(model.parameters())
    return model


def _random_adapter(base: Path, folder: Path, seed: int) -> Path:
    model = loaded(base)
    model.freeze()
    parameters = {"rank": RANK, "scale": 2.0, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), parameters)
    mx.random.seed(seed)
    tensors = {
        name: mx.random.normal(array.shape) * 0.01
        for name, array in tree_flatten(model.trainable_parameters())
    }
    config = {"num_layers": len(model.layers), "lora_parameters": parameters}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    return folder


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        sys.stdout.write(json.dumps(measured(Path(sys.argv[1]), Path(scratch))) + "\n")
