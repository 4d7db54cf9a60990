"""Every architecture of mlx-lm that has a family here loads, batches, takes an adapter, is cached
and cancelled, and says what mlx-lm itself says."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlx_server.checkpoints.architectures import module_of
from mlx_server.engine.messages import AdapterLoaded, CancelRows, LimitCache, LoadAdapter
from mlx_server.families import FAMILIES
from mlx_server.worker import batch_support
from tests.worker import batching_table
from tests.worker.architectures import ARCHITECTURES, CONFIGS
from tests.worker.kinds import Kind
from tests.worker.lora_files import linears_of, mlx_adapter, network, with_adapter
from tests.worker.newer_architectures import WINDOW
from tests.worker.test_kinds import Bench

pytestmark = pytest.mark.tables

README = Path(__file__).parents[2] / "mlx_server" / "worker" / "README.md"

TOKENS = 8
ALONE = {
    *("afm7", "deepseek_v41", "gemma2", "gpt_bigcode", "jamba", "llama4"),
    *("longcat_flash_ngram", "minimax_m3_vl", "olmo_hybrid", "phi3small"),
}
"""Those whose rows are computed one at a time."""

CACHE_BYTES = 1 << 30

ADAPTED = (
    *("q_proj", "q_b_proj", "qkv_proj", "wqkv", "c_attn", "query_key_value"),
    *("o_proj", "in_proj", "mlp.up_proj"),
)
"""What people train, by what it is called in one architecture or another."""


LENGTHS = (1, WINDOW + 1, 5, 2 * WINDOW + 6)
UNEVEN = (*LENGTHS, 3)
"""With a short prompt that has tokens of its own before those that pad it."""


class Served:
    """One architecture in one engine, and what mlx-lm says of the same prompts."""

    def __init__(self, kind: Kind, folder: Path, lengths: Sequence[int] = LENGTHS) -> None:
        self.name = kind.name
        self.path = kind.save(folder / kind.name)
        self.bench = Bench(self.path, CACHE_BYTES)
        self.prompts = prompts(lengths)
        self.expected = [generated(self.model, prompt) for prompt in self.prompts]
        self.remember(nothing=True)

    @property
    def model(self) -> Any:
        return self.bench.engine._batches["m"].model

    def remember(self, *, nothing: bool) -> None:
        self.bench.engine.handle(LimitCache(0 if nothing else CACHE_BYTES))

    def together(self, count: int = 4) -> list[list[int]]:
        rows = [self.bench.begin(prompt, TOKENS) for prompt in self.prompts[:count]]
        answers = self.bench.finish()
        return [answers[row] for row in rows]


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, n).tolist() for n in lengths]


def generated(model: Any, prompt: list[int], step: int = 2048) -> list[int]:
    """step: the most tokens of the prompt that are computed at a time."""
    steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS, prefill_step_size=step)
    return [int(token) for token, _ in steps]


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda kind: kind.name)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    yield Served(request.param, tmp_path_factory.mktemp("architectures"))
    mx.clear_cache()


def test_it_is_known_which_can_batch(served: Served) -> None:
    why = served.bench.engine._batches["m"].why_alone
    assert bool(why) == (served.name in ALONE), why


def test_four_ragged_rows_say_what_mlx_lm_says(served: Served) -> None:
    assert served.together() == served.expected


def test_a_cancelled_row_leaves_the_others_as_they_were(served: Served) -> None:
    rows = [served.bench.begin(prompt, TOKENS) for prompt in served.prompts]
    begun = [served.bench.step() for _ in range(6)]
    served.bench.engine.handle(CancelRows([rows[1]]))
    steps = [*begun, served.bench.finish()]
    for place in (0, 2, 3):
        tokens = [token for step in steps for token in step.get(rows[place], [])]
        assert tokens == served.expected[place]
    assert rows[1] not in steps[-1]


CUT_MATTERS = {"plamo3"}
"""Those whose answers depend in mlx-lm on where a prompt is cut: a window is one token longer in a
prompt than in the cache."""


def test_the_prompt_cache_changes_no_answer(served: Served) -> None:
    if served.name in CUT_MATTERS:
        pytest.skip("mlx-lm gives other answers for a prompt in two parts")
    served.remember(nothing=False)
    bench = served.bench
    first, said = served.prompts[3], served.expected[3]
    assert bench.answer(first, TOKENS) == said
    for turn in ([*first, *said, 7, 8, 9], [*first[:-5], 1, 2, 3]):
        assert bench.answer(turn, TOKENS) == generated(served.model, turn)
    assert sum(bench.cached.values()) > 0
    served.remember(nothing=True)


def test_a_row_with_an_adapter_beside_others(served: Served, tmp_path: Path) -> None:
    linears = [
        name for name in linears_of(served.path) if name.endswith(ADAPTED) and "index" not in name
    ]
    folder = mlx_adapter(tmp_path / "adapter", served.path, keys=linears, scale=20.0)
    (report,) = served.bench.engine.handle(LoadAdapter("m", "a", str(folder)))
    assert isinstance(report, AdapterLoaded), report
    theirs = with_adapter(served.path, folder)
    rows = [served.bench.begin(p, TOKENS) for p in served.prompts[:2]]
    adapted = [served.bench.begin(p, TOKENS, adapter="a") for p in served.prompts[:2]]
    answers = served.bench.finish()
    assert [answers[row] for row in rows] == served.expected[:2]
    expected = [generated(theirs, prompt) for prompt in served.prompts[:2]]
    assert [answers[row] for row in adapted] == expected
    assert expected != served.expected[:2]


@pytest.mark.parametrize("name", sorted(CUT_MATTERS))
def test_mlx_lm_itself_depends_on_where_a_prompt_is_cut(name: str, tmp_path: Path) -> None:
    model, prompt = network(Kind(name, CONFIGS[name]).save(tmp_path / name)), prompts()[3]
    assert generated(model, prompt) != generated(model, prompt, step=16)


@pytest.mark.parametrize("name", batch_support.UNBATCHABLE)
def test_what_is_said_to_be_wrong_together_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once mlx-lm computes it rightly, the table can do without it."""
    monkeypatch.setattr(batch_support, "UNBATCHABLE", {})
    served = Served(Kind(name, CONFIGS[name]), tmp_path, UNEVEN)
    assert served.bench.engine._batches["m"].why_alone == ""
    assert served.together(len(UNEVEN)) != served.expected


def test_every_architecture_with_a_family_is_here() -> None:
    types = {name for family in FAMILIES for name in family.model_types}
    modules = {module for name in types if (module := module_of({"model_type": name}))}
    tried = {module for config in CONFIGS.values() if (module := module_of(config))}
    assert modules <= tried


def test_the_readme_has_the_table_of_those_that_batch_and_those_that_do_not() -> None:
    """As `scripts/architectures` makes it."""
    readme = README.read_text("utf-8")
    together, *alone = batching_table.markdown(batching_table.reasons()).splitlines()
    assert [line for line in alone if line not in readme] == []
    assert together.partition(", rows of these")[2] in readme


SEEING = {
    "qwen3_5": "model.visual.patch_embed.proj.weight",
    "qwen3_5_moe": "vision_tower.blocks.0.attn.proj.weight",
    "gemma3": "vision_tower.vision_model.post_layernorm.weight",
    "gemma4": "model.vision_tower.encoder.layers.0.mlp.weight",
    "llama4": "vision_model.class_embedding.weight",
    "mistral3": "vision_tower.ln_pre.weight",
}
"""A weight of the part that sees images, as checkpoints name it."""


@pytest.mark.parametrize("name", SEEING)
def test_a_checkpoint_that_can_see_loads_as_one_of_text(name: str, tmp_path: Path) -> None:
    folder = Kind(name, CONFIGS[name]).save(tmp_path / name)
    blind = generated(network(folder), prompts()[1])
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    weights[SEEING[name]] = mx.ones((8, 8))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    assert generated(network(folder), prompts()[1]) == blind
