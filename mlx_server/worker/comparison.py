"""Compares two models token by token: `python -m mlx_server.worker.comparison` reads a job on its
stdin, see `engine.comparison`, and writes what it finds to its stdout.

The first model answers each prompt, and both say what they would have expected at each token of
this answer. Only one of them is in memory at a time: a file keeps the first one's distributions.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from mlx_server.engine.comparison import Answers, ComparisonJob, Divergence, Finding, Side
from mlx_server.worker.forward_pass import NO_ADAPTER, RowAdapter, RowAdapters, using
from mlx_server.worker.kv_caches import make_caches, set_kv_bits
from mlx_server.worker.lora_adapters import AdapterWeights
from mlx_server.worker.weights import loaded

PIECE, OTHER_PIECE = 512, 64
"""The tokens that are computed together, and those for measuring how much that matters."""


class LoadedSide:
    def __init__(
        self, model: nn.Module, side: Side, wait: Callable[[], object] = lambda: None
    ) -> None:
        """wait: called before each pass."""
        self._model, self._wait = model, wait
        set_kv_bits(model, side.kv_bits)
        self._adapter: RowAdapter = NO_ADAPTER
        if side.adapter:
            AdapterWeights(model).load("compared", Path(side.adapter))
            self._adapter = "compared", 1.0

    def answer(self, prompt: Sequence[int], tokens: int, stops: Sequence[int]) -> list[int]:
        caches, answer = make_caches(self._model), list[int]()
        following = [*prompt]
        while len(answer) < tokens and not (answer and answer[-1] in stops):
            for begin in range(0, len(following), PIECE):
                logits = self._pass(following[begin : begin + PIECE], caches)
            following = [int(np.array(mx.argmax(logits[-1])))]
            answer += following
        return answer

    def distributions(
        self, tokens: Sequence[int], begin: int, piece: int = PIECE
    ) -> Iterator[mx.array]:
        """Yields the log probabilities of what follows each token from `begin` on, piece by
        piece. The last token is followed by nothing."""
        caches = make_caches(self._model)
        for at in range(0, len(tokens) - 1, piece):
            end = min(at + piece, len(tokens) - 1)
            logits = self._pass(tokens[at:end], caches)
            if end > begin:
                logits = logits[max(0, begin - at) :]
                yield logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def logprobs(self, tokens: Sequence[int], begin: int, piece: int = PIECE) -> list[float]:
        """Returns those of the tokens after the one at `begin`."""
        logprobs, at = list[float](), begin
        for part in self.distributions(tokens, begin, piece):
            ids = mx.array([*tokens[at + 1 : at + 1 + len(part)]])
            logprobs += np.array(mx.take_along_axis(part, ids[:, None], axis=-1)[:, 0]).tolist()
            at += len(part)
        return logprobs

    def _pass(self, tokens: Sequence[int], caches: list[object]) -> mx.array:
        self._wait()
        with using(RowAdapters([self._adapter]), self._model):
            logits: mx.array = self._model(mx.array([tokens]), cache=caches)[0].astype(mx.float32)
        mx.eval(logits)
        return logits


def compared(job: ComparisonJob, file: IO[bytes]) -> Iterator[Finding]:
    """file: an empty one for the first side's distributions."""
    forced = [(list(prompt), 0) for prompt in job.prompts]
    for number, each in enumerate(job.sides):
        began = time.perf_counter()
        side = LoadedSide(loaded(Path(each.checkpoint)), each)
        answers = [side.answer(prompt, job.tokens, job.stops) for prompt in job.prompts]
        if number == 0 and job.tokens:
            pairs = zip(job.prompts, answers, strict=True)
            forced = [([*prompt, *answer], len(prompt) - 1) for prompt, answer in pairs]
        logprobs = [side.logprobs(*tokens) for tokens in forced]
        others = [side.logprobs(*tokens, OTHER_PIECE) for tokens in forced]
        pairs_of = [zip(a, b, strict=True) for a, b in zip(logprobs, others, strict=True)]
        differences = [abs(a - b) for pair in pairs_of for a, b in pair]
        noise = float(np.mean(differences)) if differences else 0.0
        seconds = time.perf_counter() - began
        yield Answers(answers, logprobs, noise, seconds, mx.get_peak_memory())
        for tokens in forced if len(job.sides) > 1 else []:
            if number == 0:
                for part in side.distributions(*tokens):
                    file.write(np.array(part).tobytes())
            else:
                yield _divergence(file, side.distributions(*tokens))
        file.seek(0)
        del side
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()


def _divergence(file: IO[bytes], distributions: Iterator[mx.array]) -> Divergence:
    kl, agrees = list[float](), list[bool]()
    for part in distributions:
        theirs = np.array(part)
        ours = np.frombuffer(file.read(theirs.nbytes), np.float32)
        if ours.size != theirs.size:
            raise ValueError("the models have vocabularies of different sizes")
        ours = ours.reshape(theirs.shape)
        likely = np.exp(ours.astype(np.float64))
        kl += np.sum(likely * (ours.astype(np.float64) - theirs), axis=-1).tolist()
        agrees += (ours.argmax(axis=-1) == theirs.argmax(axis=-1)).tolist()
    return Divergence(kl, agrees)


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ComparisonJob)
    with TemporaryFile() as file:
        for finding in compared(job, file):
            sys.stdout.buffer.write(msgspec.json.encode(finding) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
