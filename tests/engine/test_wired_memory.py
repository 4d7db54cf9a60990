"""Which machine wires what."""

import pytest

from mlx_server.engine.wired_memory import Wired, next_limit, wiring

GB = 10**9

MACHINES = {"16": 11.8, "32": 22.9, "36": 28.9, "64": 51.5, "96": 77.3, "128": 115.4, "512": 464.0}
"""Of RAM in GB, about what Metal recommends as the working set."""

MODELS = {
    "smollm2-135m": 0.3,
    "qwen3-8b-4bit": 4.6,
    "gpt-oss-20b": 12.1,
    "qwen3-30b-a3b-4bit": 17.2,
    "llama-70b-4bit": 39.7,
    "gpt-oss-120b": 63.4,
    "deepseek-v3-4bit": 378.0,
}


@pytest.mark.parametrize(
    ("machine", "model", "wires"),
    [
        ("16", "smollm2-135m", False),
        ("16", "qwen3-8b-4bit", False),
        ("16", "gpt-oss-20b", False),  # never fits
        ("32", "qwen3-8b-4bit", False),
        ("32", "gpt-oss-20b", True),
        ("32", "qwen3-30b-a3b-4bit", True),
        ("36", "qwen3-30b-a3b-4bit", True),
        ("64", "qwen3-30b-a3b-4bit", False),
        ("64", "llama-70b-4bit", True),
        ("64", "gpt-oss-120b", False),
        ("96", "llama-70b-4bit", True),
        ("96", "gpt-oss-120b", True),
        ("128", "llama-70b-4bit", False),
        ("128", "gpt-oss-120b", True),
        ("512", "gpt-oss-120b", False),
        ("512", "deepseek-v3-4bit", True),
    ],
)
def test_auto(machine: str, model: str, wires: bool) -> None:
    weights, working_set = int(MODELS[model] * GB), int(MACHINES[machine] * GB)
    found = wiring("auto", weights, working_set)
    assert found.limit == (weights if wires else 0)
    assert "working set" in found.why


@pytest.mark.parametrize(
    ("wired", "weights", "working_set", "limit"),
    [
        ("never", 20, 22, 0),
        (10, 20, 22, 10),
        (10, 1, 22, 1),  # nothing but weights
        (30, 20, 22, 19),  # never all of it: the system needs the rest
        ("auto", 20, 0, 0),  # no Metal
        (10, 20, 0, 0),
    ],
)
def test_set_by_its_owner(wired: Wired, weights: int, working_set: int, limit: int) -> None:
    wanted = wired * GB if isinstance(wired, int) else wired
    assert wiring(wanted, weights * GB, working_set * GB).limit // GB == limit


def test_the_limit_never_falls_nor_moves_while_rows_are_under_way() -> None:
    assert next_limit(0, 10, rows=False) == 10
    assert next_limit(10, 0, rows=False) == 10
    assert next_limit(10, 5, rows=False) == 10
    assert next_limit(10, 20, rows=False) == 20
    assert next_limit(10, 20, rows=True) == 10
