"""Policies of models in numbers small enough to follow."""

from collections.abc import Iterable

from mlx_server.pool.policy import LoadAction, Policy
from mlx_server.pool.reservations import ModelFacts
from tests.pool.policy_books import WAIT

BUDGET = 10


def policy_of(*, budget: int = BUDGET, ready: Iterable[str] = (), **facts: ModelFacts) -> Policy:
    """Models in `ready` were loaded one after the other, at 0, 1, 2 ..."""
    policy = Policy(facts, budget=budget, wait_seconds=WAIT)
    for now, model in enumerate(ready):
        assert policy.preload(model, now) == (LoadAction(model),)
        assert policy.loaded(model, facts[model].weights, now) == ()
    return policy
