"""What could harm other rows is refused before it is computed."""

import math
from dataclasses import asdict

import pytest

from mlx_server.engine.messages import Generate, PromptLogprobs
from mlx_server.requests import SamplingParams
from mlx_server.worker.engine import Engine
from tests.worker.batch_runs import ids
from tests.worker.engine_runs import GREEDY, ask, failures, of, run, tokens_of

BEYOND = 320


def named(command: Generate) -> str:
    """The name of a case."""
    unusual = {k: v for k, v in asdict(command.sampling).items() if v != getattr(GREEDY, k)}
    return f"{command.prompt[:2]} {command.max_tokens} {unusual or ''}"


@pytest.mark.tables
@pytest.mark.parametrize("score", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ask(0, prompt=0),
        ask(0, tokens=-1),
        ask(0, sampling=SamplingParams(logit_bias={BEYOND: 1.0})),
        ask(0, sampling=SamplingParams(logit_bias={-1: 1.0})),
        Generate(0, "tiny", [5, BEYOND, 5], 5, [], GREEDY),
        Generate(0, "tiny", [5, -1], 5, [], GREEDY),
        Generate(0, "tiny", [5, BEYOND], 5, [], SamplingParams(presence_penalty=1.0)),
        ask(0, sampling=SamplingParams(temperature=math.nan)),
        ask(0, sampling=SamplingParams(temperature=math.inf)),
        ask(0, sampling=SamplingParams(temperature=-1.0)),
        ask(0, sampling=SamplingParams(top_k=-1)),
        ask(0, sampling=SamplingParams(top_p=0.0)),
        ask(0, sampling=SamplingParams(min_p=-0.1)),
        ask(0, sampling=SamplingParams(min_p=1.1)),
        ask(0, sampling=SamplingParams(repetition_penalty=0.0)),
        ask(0, sampling=SamplingParams(frequency_penalty=math.inf)),
        ask(0, sampling=SamplingParams(logit_bias={3: math.inf})),
        ask(0, sampling=SamplingParams(logprobs=-1)),
        ask(0, forced_tokens=[1, 2]),  # of a model that plays none
        ask(0, forced_tokens=[]),
        ask(0, delay=-1.0),
        ask(0, delay=math.nan),
        ask(0, delay=math.inf),
    ],
    ids=named,
)
def test_what_can_not_be_done_fails_alone(
    engine: Engine, answer: list[int], command: Generate, score: bool
) -> None:
    """MLX itself would read and write past the end of an array."""
    command.prompt_logprobs = score
    reports = run(engine, command, ask(1))
    assert list(failures(reports)) == [0]
    assert tokens_of(0, reports) == []
    assert of(PromptLogprobs, reports) == []
    assert ids(tokens_of(1, reports)) == answer


def test_a_row_of_no_tokens_that_is_not_scored_fails(engine: Engine) -> None:
    assert list(failures(run(engine, ask(0, tokens=0)))) == [0]
