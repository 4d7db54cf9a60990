"""Makes the llama models of any server that is built on mlx-lm simulated ones, if this folder is on
PYTHONPATH.

MLX_SIMULATED names the pair of machine and model, MLX_SIMULATED_FILE the user's own table. The time
of a pass is slept in the call, like waiting for a GPU, so what a server does in Python is added to
it, for each server alike.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

PATCHED = "mlx_lm.models.llama"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec
        assert spec.loader
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _simulate(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _simulate(llama: Any) -> None:
    from bench_parts.simulated.forward import forward
    from bench_parts.simulated.roofline import pair

    own = os.environ.get("MLX_SIMULATED_FILE")
    machine, model = pair(os.environ["MLX_SIMULATED"], Path(own) if own else None)
    simulated = partial(forward, machine=machine, model=model, take=time.sleep)

    def call(self: Any, inputs: Any, cache: Any = None, input_embeddings: Any = None) -> Any:
        return simulated(inputs.shape, cache=cache, vocabulary=self.args.vocab_size)

    llama.Model.__call__ = call


if os.environ.get("MLX_SIMULATED"):
    sys.meta_path.insert(0, _Finder())
