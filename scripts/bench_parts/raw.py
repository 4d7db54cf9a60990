"""`python -m bench_parts.raw stream|batch FOLDER`: runs mlx-lm without a server.

It reads one load per line, as JSON, and writes its result.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import msgspec
from mlx_lm import load as load_checkpoint
from mlx_lm import stream_generate
from mlx_lm.generate import BatchGenerator

from mlx_server.clients.bench import RequestTiming, Result, Workload

Tokens = list[int]


def stream(
    model: Any, tokenizer: Any, prompts: list[Tokens], load: Workload
) -> list[RequestTiming]:
    answers = []
    for prompt in prompts:
        began = perf_counter()
        pieces = stream_generate(model, tokenizer, prompt, max_tokens=load.max_tokens)
        answers.append(_answer(began, [perf_counter() for _ in pieces], prompt))
    return answers


def batch(model: Any, tokenizer: Any, prompts: list[Tokens], load: Workload) -> list[RequestTiming]:
    stops = [[token] for token in tokenizer.eos_token_ids]
    generator = BatchGenerator(model, stop_tokens=stops, max_tokens=load.max_tokens)
    waiting = iter(prompts)
    began: dict[int, float] = {}
    times: dict[int, list[float]] = {}

    def ask() -> None:
        for prompt in waiting:
            (uid,) = generator.insert([prompt])
            began[uid], times[uid] = perf_counter(), []
            return

    for _ in range(load.clients):
        ask()
    while responses := generator.next_generated():
        now = perf_counter()
        for response in responses:
            times[response.uid].append(now)
            if response.finish_reason:
                ask()
    return [_answer(began[uid], times[uid], prompts[uid]) for uid in began]


def _answer(began: float, times: list[float], prompt: Tokens) -> RequestTiming:
    gaps = tuple(after - before for before, after in pairwise(times))
    return RequestTiming(times[0] - began, gaps, len(times), len(prompt))


KINDS: dict[str, Callable[[Any, Any, list[Tokens], Workload], list[RequestTiming]]] = {
    "stream": stream,
    "batch": batch,
}


def main() -> None:
    kind, folder = sys.argv[1:]
    model, tokenizer = load_checkpoint(folder)
    for line in sys.stdin:
        load = msgspec.json.decode(line, type=Workload)
        prompts = [tokenizer.encode(prompt) for prompt in load.prompts()]
        began = perf_counter()
        answers = KINDS[kind](model, tokenizer, prompts, load)
        result = Result(load, perf_counter() - began, tuple(answers))
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
