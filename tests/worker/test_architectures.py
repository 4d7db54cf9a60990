"""Every architecture of mlx-lm that has a family here loads, batches, takes an adapter, and says
what mlx-lm itself says, while one of its rows is cancelled."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_server.engine.messages import AdapterLoaded, LoadAdapter
from mlx_server.families import FAMILIES
from mlx_server.models.architectures import module_of
from mlx_server.worker import kv_caches, ragged_caches
from mlx_server.worker.kv_caches import make_caches
from tests.worker import batching_table
from tests.worker.bench import GREEDY
from tests.worker.kinds import ARCHITECTURES, CONFIGS, KINDS
from tests.worker.lora_files import linears_of, mlx_adapter, with_adapter
from tests.worker.served import LENGTHS, TOKENS, Served
from tests.worker.speculation.drafted_runs import Asked, DraftedRun, drafted

ALONE = {
    *("afm7", "deepseek_v41", "gemma2", "gpt_bigcode", "jamba", "llama4"),
    *("longcat_flash_ngram", "minimax_m3_vl", "olmo_hybrid", "phi3small"),
}
"""Those whose rows are computed one at a time."""


ADAPTED = (
    *("q_proj", "q_b_proj", "qkv_proj", "wqkv", "c_attn", "query_key_value"),
    *("o_proj", "in_proj", "mlp.up_proj"),
)
"""What people train, by what it is called in one architecture or another."""


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda kind: kind.name)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    yield Served(request.param, tmp_path_factory.mktemp("architectures"))
    mx.clear_cache()


SOME = pytest.mark.parametrize(
    "served", ARCHITECTURES[::9], indirect=True, ids=lambda kind: kind.name
)
"""For what differs by kind of cache and of layer: test_kinds.py has one of each."""


@pytest.mark.slow
def test_it_is_known_which_can_batch(served: Served) -> None:
    why = served.bench.engine.models.batches["m"].why_alone
    assert bool(why) == (served.name in ALONE), why


@pytest.mark.slow
def test_four_ragged_rows_say_what_mlx_lm_says(served: Served) -> None:
    assert served.ragged == served.expected


@pytest.mark.slow
def test_a_shorter_row_of_a_pass_keeps_its_state(served: Served) -> None:
    """Greedy answers of such small models hardly show a state that was lost."""
    if served.name in ALONE:
        return
    prompts = [list(range(1, 40)), list(range(50, 60))]
    ends = []
    for rows in ([0], [1], [0, 1]):
        lengths = [len(prompts[row]) for row in rows]
        layers = zip(*(make_caches(served.model) for _ in rows), strict=True)
        batch = [layer[0].merge(list(layer)) for layer in layers]
        padding = [max(lengths) - length for length in lengths]
        for entry in batch:
            entry.prepare(lengths=lengths, right_padding=padding)
        tokens = [prompts[row] + [0] * pad for row, pad in zip(rows, padding, strict=True)]
        served.model(mx.array(tokens), cache=batch)
        for entry in batch:
            entry.finalize()
        ends.append(served.model(mx.array([[7]] * len(rows)), cache=batch)[:, -1])
    assert mx.allclose(mx.concatenate(ends[:2]), ends[2], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "served",
    [kind for kind in ARCHITECTURES if "window" in str(kind.config) and kind.name not in ALONE],
    indirect=True,
    ids=lambda kind: kind.name,
)
def test_a_window_has_as_many_tokens_after_a_piece(served: Served) -> None:
    tokens, caches = mx.array([served.prompts[3]]), make_caches(served.model)
    served.model(tokens[:, :-3], cache=caches)
    last = served.model(tokens[:, -3:], cache=caches)[:, -1]
    whole = served.model(tokens, cache=make_caches(served.model))[:, -1]
    assert mx.allclose(last, whole, atol=1e-3)


@pytest.mark.slow
def test_drafts_change_no_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_caches, "SPARE", 0)  # windows drop old columns in each pass
    asked = [Asked(prompt, GREEDY, TOKENS, right=0.8) for prompt in served.prompts]
    run = DraftedRun(served.model, asked, served.expected).finish()
    assert run.answers == served.expected
    _, held = drafted(chain.from_iterable(run.tokens.values()))
    assert bool(held) == (served.name not in ALONE)


@pytest.mark.slow
@SOME
def test_a_row_with_an_adapter_beside_others(served: Served, tmp_path: Path) -> None:
    plain = served.expected[:2]  # of mlx-lm, whose model is the one that adapters are loaded into
    linears = [
        name for name in linears_of(served.path) if name.endswith(ADAPTED) and "index" not in name
    ]
    folder = mlx_adapter(tmp_path / "adapter", served.path, keys=linears, scale=20.0)
    served.remember(nothing=True)
    (report,) = served.bench.engine.handle(LoadAdapter("m", "a", str(folder)))
    assert isinstance(report, AdapterLoaded), report
    asked = served.prompts[:2]
    rows = [served.bench.begin(prompt, TOKENS) for prompt in asked]
    adapted = [served.bench.begin(prompt, TOKENS, adapter="a") for prompt in asked]
    finished = served.bench.finish()
    assert [finished[row] for row in rows] == plain
    answers = [finished[row] for row in adapted]
    theirs = with_adapter(served.path, folder)
    assert answers == served.mlx_lm_answers(asked, answers, theirs)
    assert answers != plain


def test_every_architecture_with_a_family_is_here() -> None:
    types = {name for family in FAMILIES for name in family.model_types}
    modules = {module for name in types if (module := module_of({"model_type": name}))}
    tried = {module for config in CONFIGS.values() if (module := module_of(config))}
    assert modules <= tried


README = Path(__file__).parents[2] / "mlx_server" / "worker" / "README.md"
UNEVEN = (*LENGTHS, 3)
"""With a short prompt that has tokens of its own before those that pad it."""


@pytest.mark.parametrize("name", kv_caches.UNBATCHABLE)
def test_what_is_said_to_be_wrong_together_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once mlx-lm computes it rightly, the table can do without it."""
    monkeypatch.setattr(kv_caches, "UNBATCHABLE", {})
    served = Served(KINDS[name], tmp_path, UNEVEN)
    assert served.bench.engine.models.batches["m"].why_alone == ""
    answers = served.together(len(UNEVEN))
    assert answers != served.mlx_lm_answers(served.prompts, answers)


def test_the_readme_has_the_table_of_those_that_do_not_batch() -> None:
    """As `scripts/architectures` makes it."""
    readme = README.read_text("utf-8")
    sentence, *lines = batching_table.markdown(batching_table.reasons()).splitlines()
    assert [line for line in lines if line not in readme] == []
    assert sentence.partition(", ")[2] in readme
