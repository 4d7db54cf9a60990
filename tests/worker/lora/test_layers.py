"""What takes adapters and what does not, how they are stacked, and that nothing is left of them."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_server.errors import AdapterInvalid
from mlx_server.worker.forward_pass import RowAdapters, using
from mlx_server.worker.lora_adapters import AdapterWeights
from tests.worker.lora_files import save

WIDTH, RANK = 8, 2


def pair(seed: int = 0, dtype: mx.Dtype = mx.float32, rank: int = RANK) -> dict[str, mx.array]:
    a, b = mx.random.split(mx.random.key(seed))
    return {
        "layer.lora_a": mx.random.normal((WIDTH, rank), key=a).astype(dtype),
        "layer.lora_b": mx.random.normal((rank, WIDTH), key=b).astype(dtype),
    }


def same(x: mx.array, y: mx.array) -> bool:
    return bool(mx.allclose(x, y, atol=1e-4))


class Toy(nn.Module):  # type: ignore[misc]
    """The least that can be called as a language model is."""

    def __init__(self, layer: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layer = layer or nn.Linear(WIDTH, WIDTH)

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return self.through(self.embed(ids))

    def through(self, x: mx.array) -> mx.array:
        y: mx.array = self.layer(x)
        return y


class Idle(Toy):
    def through(self, x: mx.array) -> mx.array:
        return x


class Reading(Toy):
    def through(self, x: mx.array) -> mx.array:
        y: mx.array = x @ self.layer.weight.T
        return y


class Compiled(Toy):
    """As one model does with its steps of decoding; prompts go another way."""

    step: Any = None

    def through(self, x: mx.array) -> mx.array:
        if x.shape[1] > 1:
            return super().through(x)
        self.step = self.step or mx.compile(super().through)
        y: mx.array = self.step(x)
        return y


class Turned(Toy):
    """Tokens first, then rows."""

    def through(self, x: mx.array) -> mx.array:
        return super().through(x.swapaxes(0, 1)).swapaxes(0, 1)


class Own(nn.Linear):  # type: ignore[misc]
    """What is derived from a linear may compute anything."""


def adapter(folder: Path, tensors: dict[str, mx.array], scale: float = 1.0) -> Path:
    config = {"num_layers": 1, "lora_parameters": {"rank": RANK, "scale": scale}}
    return save(folder, config, tensors)


REFUSED: dict[str, tuple[Callable[[], Toy], str]] = {
    "read directly": (Reading, "does not call this layer"),
    "compiled": (Compiled, "does not call this layer"),
    "takes no part": (Idle, "does not call this layer"),
    "tokens first": (Turned, "row by row"),
    "derived": (lambda: Toy(Own(WIDTH, WIDTH)), "a Own can't take LoRA"),
    "a norm": (lambda: Toy(nn.RMSNorm(WIDTH)), "a RMSNorm can't take LoRA"),
    "bare experts": (lambda: Toy(SwitchLinear(WIDTH, WIDTH, 2)), "experts of a Toy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_in_which_it_would_come_to_nothing_is_refused(name: str, tmp_path: Path) -> None:
    make, said = REFUSED[name]
    model = make()
    kind = type(model.layer)
    with pytest.raises(AdapterInvalid, match=f"^layer.*{said}"):
        AdapterWeights(model).load("one", adapter(tmp_path, pair()))
    assert type(model.layer) is kind
    assert not hasattr(model.layer, "slots")


def test_what_was_not_trained_of_a_layer_that_takes_no_part_is_passed_over(tmp_path: Path) -> None:
    model = Idle()
    tensors = {**pair(), "layer.lora_b": mx.zeros((RANK, WIDTH))}
    with pytest.raises(AdapterInvalid, match="changes no layer"):
        AdapterWeights(model).load("one", adapter(tmp_path / "one", tensors))
    tensors |= {"embed.lora_a": mx.ones((16, RANK)), "embed.lora_b": mx.ones((RANK, WIDTH))}
    AdapterWeights(model).load("two", adapter(tmp_path / "two", tensors))
    with using(RowAdapters([("two", 1.0)]), model):
        assert same(model(mx.array([[5]])), model.embed.weight[5] + RANK)


STORED = [
    (mx.float16, mx.float32, mx.float32),
    (mx.bfloat16, mx.float32, mx.float32),
    (mx.float32, mx.bfloat16, mx.float32),
    (mx.float16, mx.bfloat16, mx.float32),
    (mx.bfloat16, mx.float16, mx.float16),
]


@pytest.mark.parametrize(("stored", "model_type", "precision"), STORED)
def test_an_adapter_is_kept_at_no_less_than_either_precision(
    tmp_path: Path, stored: mx.Dtype, model_type: mx.Dtype, precision: mx.Dtype
) -> None:
    model = Toy()
    model.set_dtype(model_type)
    AdapterWeights(model).load("one", adapter(tmp_path, pair(dtype=stored)))
    assert [array.dtype for array in model.layer.slots.deltas["one"].arrays] == [precision] * 2
    with using(RowAdapters([("one", 1.0)]), model):
        assert model(mx.array([[1]])).dtype == model_type


def test_an_unused_adapter_costs_nothing(tmp_path: Path) -> None:
    """The graph of a forward is the same as before."""
    model = Toy()
    adapters = AdapterWeights(model)
    before = _graph(model)
    adapters.load("one", adapter(tmp_path, pair()))
    with using(RowAdapters([(None, 1.0), (None, 0.5)]), model):
        assert _graph(model) == before
    with using(RowAdapters([("other", 1.0)]), model):
        assert _graph(model) == before
    with using(RowAdapters([("one", 1.0)]), model):
        assert _graph(model) > before
    adapters.unload("one")
    assert _graph(model) == before


def _graph(model: Toy) -> int:
    """Lines that describe how the output is computed."""
    drawing = io.StringIO()
    mx.export_to_dot(drawing, model(mx.array([[1]])))
    return len(drawing.getvalue().splitlines())
