"""Which models can share a batch is known, and said in the README."""

from pathlib import Path

import pytest

from mlx_server.worker import kv_caches
from tests.worker import batching_table
from tests.worker.kinds import CONFIGS, Kind
from tests.worker.served import LENGTHS, Served

README = Path(__file__).parents[2] / "mlx_server" / "worker" / "README.md"
UNEVEN = (*LENGTHS, 3)
"""With a short prompt that has tokens of its own before those that pad it."""


@pytest.mark.parametrize("name", kv_caches.UNBATCHABLE)
def test_what_is_said_to_be_wrong_together_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once mlx-lm computes it rightly, the table can do without it."""
    monkeypatch.setattr(kv_caches, "UNBATCHABLE", {})
    served = Served(Kind(name, CONFIGS[name]), tmp_path, UNEVEN)
    assert served.bench.engine.models.batches["m"].why_alone == ""
    answers = served.together(len(UNEVEN))
    assert answers != served.mlx_lm_answers(served.prompts, answers)


def test_the_readme_has_the_table_of_those_that_do_not_batch() -> None:
    """As `scripts/architectures` makes it."""
    readme = README.read_text("utf-8")
    sentence, *lines = batching_table.markdown(batching_table.reasons()).splitlines()
    assert [line for line in lines if line not in readme] == []
    assert sentence.partition(", ")[2] in readme
