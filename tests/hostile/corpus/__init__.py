"""The hostile corpus: each module but `attack` and `making` is a category; see README.md.

Nothing here knows which server is attacked: `scripts/attack` reads it too.
"""

from collections.abc import Iterator

from tests.hostile.corpus import (
    completions,
    grammars,
    json,
    models,
    prompts,
    responses,
    sampling,
    tools,
    transport,
)
from tests.hostile.corpus.attack import Attack, Bytes, Call, Expected, Json, Step, Target
from tests.hostile.corpus.making import posted

__all__ = ["Attack", "Bytes", "Call", "Expected", "Json", "Step", "Target", "attacks", "posted"]

CATEGORIES = (completions, grammars, json, models, prompts, responses, sampling, tools, transport)


def attacks(target: Target) -> Iterator[Attack]:
    for module in CATEGORIES:
        for group in module.groups(target):
            yield from group.all(module.__name__.rpartition(".")[2])
