"""`python -m bench_parts.loading FOLDER`: measures how long a stream waits while another model
loads.

The engine runs in this process. One model decodes while the same weights are loaded as another
model. It prints the largest gap between two tokens meanwhile, divided by the median step before.
"""

import sys
from itertools import pairwise
from statistics import median
from time import perf_counter

from mlx_server.engine.messages import Generate, LoadModel, StepOutput
from mlx_server.requests import SamplingParams
from mlx_server.worker.engine import Engine

STEPS = 200
"""The number of the stream's steps before the load."""

STOPS = [2]
"""Stop tokens of both of the bench's models; with stop tokens the engine prepares for grammars."""


def measured(folder: str) -> float:
    engine = Engine()
    engine.handle(LoadModel("running", folder, STOPS))
    while engine.pause is not None:
        engine.step()
    sampling = SamplingParams(temperature=0)
    engine.handle(Generate(0, "running", [5, 6, 7], 4 * STEPS, [], sampling))
    # the first steps compile kernels
    steps = [_token(engine) for _ in range(2 * STEPS)][STEPS:]
    alone = median(after - before for before, after in pairwise(steps))
    engine.handle(LoadModel("loading", folder, STOPS))
    times = [steps[-1]]
    while engine.loading:
        times.append(_token(engine))
    times.append(_token(engine))
    return max(after - before for before, after in pairwise(times)) / alone


def _token(engine: Engine) -> float:
    """Returns the time at which the next token has arrived."""
    while True:
        if any(isinstance(report, StepOutput) and report.tokens for report in engine.step()):
            return perf_counter()


if __name__ == "__main__":
    sys.stdout.write(f"{measured(sys.argv[1])}\n")
