"""Whatever the server asks, and whenever: a rank that repeats rank 0's inputs draws its tokens, and
sends its drafts.

Both engines hold the whole model, in this process and one after the other, so that only the inputs
connect them.
"""

import queue
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.engine.messages import (
    CancelRows,
    Command,
    Generate,
    LoadModel,
    PauseRows,
    PreemptRows,
    Report,
    ResumeRows,
    StepOutput,
    Token,
    UnpauseRows,
)
from mlx_server.engine.worker_arguments import WorkerArguments
from mlx_server.requests import SamplingParams
from mlx_server.worker.engine import engine_of, run_steps
from mlx_server.worker.ranks.link import Diverged, RecordedInputs, RepeatedInputs, decode_input
from mlx_server.worker.server_connection import HeartbeatMonitor, Inputs, OwnInputs
from tests.tiny import IM_END, tiny_llama
from tests.worker.batch_runs import a_prompt
from tests.worker.engine_runs import grammar_of
from tests.worker.speculation.mixed_requests import any_draft_is_sent

pytestmark = pytest.mark.slow

STEPS = 24
LENGTH = 12
"""Tokens of each answer."""

KINDS: tuple[Callable[[list[int]], Command], ...] = (
    CancelRows,
    PauseRows,
    UnpauseRows,
    PreemptRows,
    ResumeRows,
)
GRAMMARS = (None, None, "start: /[a-z]{1,30}/\n")
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(seed=3, repetition_penalty=1.2, logprobs=2),
)


@st.composite
def scripts(draw: st.DrawFn) -> list[list[Command]]:
    """The commands of each step: up to two new rows, and what happens to those there are."""
    script: list[list[Command]] = []
    count = 0
    for _ in range(draw(st.integers(1, STEPS))):
        commands: list[Command] = []
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            count += 1
            prompt = a_prompt(draw(st.integers(1, 200)), draw(st.integers(0, 3)))
            sampling, grammar = draw(st.sampled_from(SAMPLINGS)), draw(st.sampled_from(GRAMMARS))
            commands.append(
                Generate(
                    *(count, "m", prompt, LENGTH, [IM_END], sampling),
                    grammar=grammar_of(grammar),
                    own_seed=count,
                )
            )
        if count and draw(st.booleans()):
            rows = st.lists(st.integers(1, count), min_size=1, max_size=3, unique=True)
            commands.append(draw(st.sampled_from(KINDS))(draw(rows)))
        script.append(commands)
    return script


class Script(OwnInputs):
    """Commands that were written before; the server is gone once all rows have ended."""

    def __init__(self, steps: Iterable[list[Command]]) -> None:
        super().__init__(queue.SimpleQueue())
        self._steps = iter(steps)

    def take(self, pause: float | None) -> list[Command]:
        commands = next(self._steps, None)
        if commands is None and pause is None:
            raise EOFError
        return commands or []


def drawn(inputs: Inputs) -> list[list[Token]]:
    """The tokens of each step that an engine takes with these inputs."""
    found: list[list[Token]] = []

    def send(*reports: Report) -> None:
        outputs = [each for each in reports if isinstance(each, StepOutput)]
        found.append([token for output in outputs for token in output.tokens])

    engine = engine_of(WorkerArguments(concurrency=4, cache_bytes=4 << 20), inputs)
    with suppress(Diverged), any_draft_is_sent():  # the end of what rank 0 has recorded
        run_steps(engine, HeartbeatMonitor(), inputs, send)
    return [tokens for tokens in found if tokens]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("ranks") / "tiny")


@settings(max_examples=6, deadline=None)
@given(script=scripts())
def test_any_commands_at_any_step(model: Path, script: list[list[Command]]) -> None:
    recorded: queue.SimpleQueue[Any] = queue.SimpleQueue()
    load: list[Command] = [LoadModel("m", str(model), [IM_END], str(model))]
    inputs = RecordedInputs(Script([load, *script]), lambda each: recorded.put(decode_input(each)))
    first = drawn(inputs)
    recorded.put(None)  # no kind of input
    assert drawn(RepeatedInputs(recorded)) == first
    assert recorded.empty(), "the second has read all of it"
