"""The adapters that are shipped, on the real demo model, many in one batch: as mlx-lm with each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.tuner.utils import load_adapters, remove_lora_layers

from tests.worker.batch_runs import CLOSE
from tests.worker.lora.desk import Desk, RowRequest

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parents[3] / "adapters"
PIRATE, JSON = "pirate", "json-answer"

ROWS = (
    ("What is the capital of France?", None),
    ("What is the capital of France?", PIRATE),
    ("What is the capital of France?", JSON),
    ("Hello!", PIRATE),
)
TOKENS = 8


def test_each_row_of_a_mixed_batch_answers_as_mlx_lm_with_its_adapter(demo_path: Path) -> None:
    prompts = _prompts(demo_path, [question for question, _ in ROWS])
    rows = [RowRequest(ids, adapter) for ids, (_, adapter) in zip(prompts, ROWS, strict=True)]
    desk = Desk(demo_path).loaded(**{name: SAMPLES / name for name in (PIRATE, JSON)})
    answers = desk.all_of(rows, TOKENS)
    assert len({tuple(answer) for answer in answers[:2]}) == 2, "to the same question"
    assert [len(answer) for answer in answers] == [TOKENS] * len(ROWS)
    network: Any = mlx_lm.utils.load_model(demo_path)[0]
    for adapter in (None, PIRATE, JSON):
        _adapt(network, adapter)
        for row, answer in zip(rows, answers, strict=True):
            if row.adapter == adapter:
                assert_greedy(network, row.prompt, answer)


def _prompts(base: Path, questions: Sequence[str]) -> list[list[int]]:
    tokenizer: Any = mlx_lm.utils.load_tokenizer(base)
    short = {"role": "system", "content": ""}  # the template's own is longer than the questions
    chats = [[short, {"role": "user", "content": question}] for question in questions]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]


def _adapt(network: Any, adapter: str | None) -> None:
    """As mlx-lm does, in the precision of our engine: see worker/weights.py."""
    remove_lora_layers(network)
    if adapter:
        load_adapters(network, str(SAMPLES / adapter))
    network.eval()
    if not mx.metal.is_available():
        network.set_dtype(mx.float32)


def assert_greedy(network: Any, prompt: list[int], answer: list[int]) -> None:
    """Each token is the likeliest after those before it, or ties with it: then both are right.

    So it is what mlx-lm would generate, found in one pass instead of one a token.
    """
    (logits,) = network(mx.array([[*prompt, *answer[:-1]]]))
    logits = logits[len(prompt) - 1 :]
    chosen = mx.take_along_axis(logits, mx.array(answer)[:, None], axis=-1)[:, 0]
    assert mx.all(logits.max(axis=-1) - chosen < CLOSE), answer
