"""What a comparison of two models is asked and finds, and the process that computes it."""

import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from mlx_server.engine.engine_process import process_environment
from mlx_server.errors import ComparisonFailed

STDERR_CHARACTERS = 2000


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it is compared."""

    checkpoint: str
    kv_bits: int | None = None
    adapter: str | None = None
    """The folder of a LoRA adapter."""


class ComparisonJob(msgspec.Struct, frozen=True, kw_only=True):
    sides: Sequence[Side]
    """The one whose answers are compared, and another. A single one is only measured."""
    prompts: Sequence[Sequence[int]]
    tokens: int
    """The most tokens of an answer."""
    stops: Sequence[int] = ()


class Answers(msgspec.Struct, frozen=True, tag=True):
    """What a side answers by itself, always the likeliest token."""

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    """Those of the first side's answers, or of all tokens of the prompts if none are asked for."""
    noise: float
    """The mean by which they differ if the same tokens are computed in other pieces."""
    seconds: float
    nbytes: int


class Divergence(msgspec.Struct, frozen=True, tag=True):
    """For one prompt: at each token of the first side's answer, KL divergence of the second side's
    next token from the first's, and whether both find the same one the likeliest."""

    kl: Sequence[float]
    agrees: Sequence[bool]


Finding = Answers | Divergence
_decoder: msgspec.json.Decoder[Finding] = msgspec.json.Decoder(Finding)


def findings(job: ComparisonJob) -> Iterator[Finding]:
    """Yields the answers of each side, and for two the divergence of each prompt. Raises
    ComparisonFailed."""
    process = subprocess.Popen(
        (sys.executable, "-m", "mlx_server.worker.comparison"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=process_environment(),
    )
    with process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        try:
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            yield from map(_decoder.decode, process.stdout)
        except BaseException:
            process.kill()
            raise
        text = process.stderr.read().decode(errors="replace")
    if process.returncode:
        why = text.strip().rsplit("\n", 1)[-1][-STDERR_CHARACTERS:]
        raise ComparisonFailed(f"The models could not be compared: {why or 'no message'}")
