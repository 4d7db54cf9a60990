"""What several adapters add to one layer is stacked, once in memory."""

import gc

import mlx.core as mx

from mlx_server.worker.lora.layers import AdapterSlots, ForwardPass, LoraDelta, RowAdapters
from tests.worker.lora.toys import RANK, WIDTH, same


def slots(*ranks: int) -> AdapterSlots:
    made = AdapterSlots(ForwardPass())
    for n, rank in enumerate(ranks):
        a, b = mx.random.split(mx.random.key(n))
        size = (WIDTH, rank), (rank, WIDTH)
        made.put(
            f"{n}", LoraDelta(mx.random.normal(size[0], key=a), mx.random.normal(size[1], key=b))
        )
    return made


def stacked(made: AdapterSlots) -> list[tuple[str, ...]]:
    return sorted(stack.adapters for stack in made._stacks.values())


def computed(made: AdapterSlots, *adapters: str | None) -> None:
    """And that it is right."""
    rows = RowAdapters([(adapter, 1.0) for adapter in adapters])
    x = mx.ones((len(adapters), 1, WIDTH))
    expected = [
        x[0] @ made.deltas[adapter].a @ made.deltas[adapter].b if adapter else mx.zeros((1, WIDTH))
        for adapter in adapters
    ]
    mx.eval(expected)
    for _ in range(2):  # the second time, what was found for these rows is used again
        assert same(made.linear(x, rows), mx.stack(expected))


def test_only_what_was_mixed_is_stacked_and_stays_so() -> None:
    made = slots(RANK, RANK, RANK, RANK)
    computed(made, "1", "1")
    assert stacked(made) == []
    computed(made, "1", None)
    assert stacked(made) == [("1",)]
    computed(made, "2", "1")
    (first,) = made._stacks.values()
    assert first.adapters == ("1", "2")
    computed(made, "2", None)
    assert list(made._stacks.values()) == [first]
    computed(made, "3", None)
    assert stacked(made) == [("1", "2", "3")]
    made.remove("0")
    assert stacked(made) == [("1", "2", "3")]
    made.remove("3")
    assert stacked(made) == [("1", "2")]
    computed(made, "2", None, "1")
    made.remove("1")
    made.remove("2")
    assert stacked(made) == []


def test_a_name_that_comes_again_has_its_new_weights() -> None:
    made = slots(RANK, RANK)
    rows = RowAdapters([("0", 1.0), ("1", 1.0)])
    x = mx.ones((2, 1, WIDTH))
    before = made.linear(x, rows)
    delta = made.deltas["1"]
    mx.eval(before, delta.arrays)
    made.remove("1")
    made.put("1", LoraDelta(-delta.a, delta.b))
    after = made.linear(x, rows)
    assert same(after[0], before[0])
    assert same(after[1], -before[1])


def test_ranks_far_from_each_other_are_stacked_apart() -> None:
    made = slots(2, 5, 8, 300)
    computed(made, "0", "3", None, "1", "2")
    assert stacked(made) == [("0",), ("1", "2"), ("3",)]
    made.remove("2")
    computed(made, "1", "0", "3")
    ranks = sorted(delta.a.shape[-1] for delta in made.deltas.values())
    assert ranks == [2, 8, 300]  # at most doubled


def test_what_is_stacked_is_in_memory_once() -> None:
    size, count = 1 << 20, 8
    made = AdapterSlots(ForwardPass())
    memory = mx.get_active_memory()
    for n in range(count):
        made.put(f"{n}", LoraDelta(mx.full((size // 64, 8), 0.5), mx.full((8, size // 64), 0.5)))
    mx.eval(made.arrays)
    loose = mx.get_active_memory() - memory
    rows = RowAdapters([(f"{n}", 1.0) for n in range(count)])
    mx.eval(made.linear(mx.ones((count, 1, size // 64)), rows))
    del rows
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - memory < (count + 1.1) / count * loose
    for n in range(count - 1):
        made.remove(f"{n}")
        mx.eval(made.arrays)
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - memory < 2.1 / count * loose
