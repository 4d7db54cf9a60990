"""Prefill and decode: the model's own tokens, and one sampling a step."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_server.requests import SamplingParams
from mlx_server.worker import sampling
from mlx_server.worker.sampling import Sampled, Sampler
from tests.worker.batch_runs import MIXED, Ask, Run, a_prompt, alone, together


def without_cache(model: Any, prompt: list[int], count: int) -> list[mx.array]:
    """Each greedy step's logits, from one pass over the whole sequence so far."""
    tokens, steps = list(prompt), []
    for _ in range(count):
        steps.append(model(mx.array([tokens]))[0, -1])
        tokens.append(int(mx.argmax(steps[-1])))
    return steps


def test_each_token_comes_with_its_own_log_probabilities(tiny_model: Any) -> None:
    ask = Ask(a_prompt(9), max_tokens=8, sampling=SamplingParams(temperature=0, logprobs=2))
    answer = alone(tiny_model, ask)
    for token, logits in zip(answer, without_cache(tiny_model, ask.prompt, 8), strict=True):
        exact = logits - mx.logsumexp(logits)
        assert token.logprobs
        assert token.logprobs.chosen == pytest.approx(float(exact[token.id]), abs=1e-3)
        assert token.logprobs.top[0] == (token.id, token.logprobs.chosen)


def test_a_step_samples_once_for_all_rows(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    sample = Sampler.__call__

    def counted(self: Sampler, logits: mx.array, inputs: mx.array, *masks: Any) -> Sampled:
        calls.append(len(self.rows))
        return sample(self, logits, inputs, *masks)

    monkeypatch.setattr(Sampler, "__call__", counted)
    run = Run(tiny_model)
    for number, params in enumerate(MIXED):
        run.join(number, Ask(a_prompt(5), 10 + number, sampling=params))
    run.until_decoding()
    assert sum(calls) == len(MIXED)
    calls.clear()
    run.step()
    assert calls == [len(MIXED)]
    for _ in range(3):
        run.step()
    assert calls == [len(MIXED)] * 4


def test_nobody_asked_and_no_logprobs_are_computed(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    step_logprobs = sampling.step_logprobs

    def counted(logits: mx.array, tokens: mx.array, most: int) -> sampling.StepLogprobs:
        computed.append(len(tokens))
        return step_logprobs(logits, tokens, most)

    monkeypatch.setattr(sampling, "step_logprobs", counted)
    silent = [Ask(a_prompt(5), 4), Ask(a_prompt(3), 4, sampling=MIXED[2])]
    answers = together(tiny_model, silent)
    assert computed == []
    assert {token.logprobs for answer in answers for token in answer} == {None}

    asking = Ask(a_prompt(4), 4, sampling=SamplingParams(temperature=0, logprobs=2))
    together(tiny_model, [*silent, asking])
    assert set(computed) == {1}
