"""Random requests to ranks that send any part of any draft, over MLX's ring on loopback.

`python -m tests.worker.speculation.drafting_ranks MODE MODEL TOKENIZER SEED COUNT` is rank 0, which
starts the other one. It prints the outcome, compared with one process that drafts nothing.
"""

import queue
import subprocess
import sys
from pathlib import Path

import msgspec

from mlx_server.engine.messages import Command, Report
from mlx_server.engine.worker_arguments import Mode, RankGroup, WorkerArguments
from mlx_server.worker.engine import engine_of, run_steps
from mlx_server.worker.ranks import follower, leader
from mlx_server.worker.server_connection import HeartbeatMonitor, OwnInputs
from tests.live.ranks import loopback_group
from tests.tiny import TOKENS
from tests.worker.kinds import CONFIGS, Kind
from tests.worker.speculation.mixed_requests import MixedRun, Model, Outcome, any_draft_is_sent

MODULE = "tests.worker.speculation.drafting_ranks"


class Clients(OwnInputs):
    def __init__(self, run: MixedRun) -> None:
        super().__init__(queue.SimpleQueue())
        self._run = run

    def take(self, pause: float | None) -> list[Command]:
        commands = self._run.commands(idle=pause is None)
        if commands is None:
            raise EOFError
        return commands


class Sender:
    def __init__(self, run: MixedRun) -> None:
        self._run = run

    def send(self, *reports: Report) -> None:
        self._run.take(*reports)


def lead(group: RankGroup, run: MixedRun) -> None:
    arguments = WorkerArguments(concurrency=8, cache_bytes=1 << 30)
    own = leader.Leader(group, arguments, Sender(run))  # type: ignore[arg-type]
    share, inputs, send = own.join(Clients(run))
    run_steps(engine_of(arguments, inputs, share), HeartbeatMonitor(), inputs, send)


def main(mode: Mode, path: str, tokenizer: str, seed: str, count: str) -> None:
    run = MixedRun(Model(Path(path), TOKENS, Path(tokenizer)), int(seed), int(count))
    leader.MODULE = MODULE
    lead(loopback_group(2, mode), run)
    print(msgspec.json.encode(run.outcome).decode(), flush=True)


RING: tuple[tuple[Mode, str], ...] = (
    ("tensor", "llama"),
    ("tensor", "gpt_oss"),
    ("tensor", "qwen3_5"),
    ("pipeline", "qwen3_moe"),
    ("pipeline", "qwen2"),
)

SPLIT = {"num_key_value_heads": 4, "num_hidden_layers": 4}
"""So that two ranks can share the heads, or the layers."""


def ring_outcome(
    mode: Mode, name: str, folder: Path, tokenizer: Path, seed: int, count: int
) -> Outcome:
    path = Kind(name, {**CONFIGS[name], **SPLIT}).save(folder / f"{name} {mode}")
    arguments = map(str, (mode, path, tokenizer, seed, count))
    run = subprocess.run([sys.executable, "-m", MODULE, *arguments], capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    return msgspec.json.decode(run.stdout, type=Outcome)


if __name__ == "__main__":
    with any_draft_is_sent():
        if sys.argv[1] in ("tensor", "pipeline"):
            main(*sys.argv[1:])  # type: ignore[arg-type]
        else:
            follower.main()
