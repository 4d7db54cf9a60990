"""`python -m bench_parts.loading FOLDER`: how long a stream waits while another model loads.

The engine in this process, one model decoding, the same weights loaded next to it as another.
Prints the largest gap between two tokens meanwhile, over the median of the steps before.
"""

import sys
from itertools import pairwise
from statistics import median
from time import perf_counter

from mlx_server.engine.messages import Generate, LoadModel, StepOutput
from mlx_server.requests import SamplingParams
from mlx_server.worker.worker import Engine

STEPS = 200
"""Of the stream by itself."""

STOPS = [2]
"""Both of the bench's models have it; with one, the engine prepares for grammars."""


def measured(folder: str) -> float:
    engine = Engine()
    engine.handle(LoadModel("running", folder, STOPS))
    while engine.pause is not None:
        engine.step()
    sampling = SamplingParams(temperature=0)
    engine.handle(Generate(0, "running", [5, 6, 7], 4 * STEPS, [], sampling))
    # the first ones compile kernels
    steps = [_token(engine) for _ in range(2 * STEPS)][STEPS:]
    alone = median(after - before for before, after in pairwise(steps))
    engine.handle(LoadModel("loading", folder, STOPS))
    times = [steps[-1]]
    while engine.loading:
        times.append(_token(engine))
    times.append(_token(engine))
    return max(after - before for before, after in pairwise(times)) / alone


def _token(engine: Engine) -> float:
    """When the next token has come."""
    while True:
        if any(isinstance(report, StepOutput) and report.tokens for report in engine.step()):
            return perf_counter()


if __name__ == "__main__":
    sys.stdout.write(f"{measured(sys.argv[1])}\n")
