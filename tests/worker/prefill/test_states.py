"""Whatever state the prompt cache is in, answers are those of an engine without one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_server.engine.messages import ComputeAhead
from mlx_server.worker.mlx_lm_internals import RotatingKVCache
from mlx_server.worker.prefill.stored_prompt import arrays_of, layers_of
from tests.worker.lora_files import network
from tests.worker.one_pass import expected
from tests.worker.prefill.disk_runs import Process, words

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_at_once")]

NAMES = (
    *("llama", "gpt_oss", "gemma3_text", "gemma4_text"),
    *("qwen3_5-text", "qwen3_next", "nemotron_h", "lfm2"),
    *("granitemoehybrid", "falcon_h1", "kimi_linear", "mamba2"),
)
"""Full attention, and each kind of window and recurrent state."""
IN_EIGHT_BITS = ("llama", "gemma3_text", "qwen3_5-text", "nemotron_h", "falcon_h1")
"""One of each kind of them whose keys and values can be kept in 8 bits."""
SYSTEM, TURN, TOKENS = words(0, 100), 40, 4


@dataclass
class Engines:
    path: Path
    folder: Path
    bits: int | None

    def without_cache(self) -> Callable[[list[int], list[int]], list[int]]:
        """Returns what answers a prompt, given what the other engine answered."""
        if self.bits:
            cold = Process(self.path, None, kv_bits=self.bits, cache_bytes=0)
            return lambda prompt, _: cold.answer(prompt, TOKENS)
        model = network(self.path)
        return lambda prompt, answer: expected(model, prompt, answer, TOKENS)

    def warm(self) -> Process:
        return Process(self.path, self.folder, kv_bits=self.bits)


@pytest.fixture(
    scope="module",
    params=[*((name, None) for name in NAMES), *((name, 8) for name in IN_EIGHT_BITS)],
    ids=lambda each: f"{each[0]}, {each[1]} bits" if each[1] else each[0],
)
def engines(
    request: pytest.FixtureRequest,
    made: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Engines:
    name, bits = request.param
    return Engines(made(name), tmp_path_factory.mktemp("files"), bits)


def test_answers_are_those_of_a_cold_engine(engines: Engines) -> None:
    cold, warm = engines.without_cache(), engines.warm()

    def check(process: Process, prompt: list[int], known: int) -> list[int]:
        """known: how many of the prompt's tokens have to be cached."""
        answer = process.answer(prompt, TOKENS, branches=[len(SYSTEM)], shared=len(SYSTEM))
        assert answer == cold(prompt, answer)
        assert process.known == known
        return [*prompt, *answer]

    first = check(warm, [*SYSTEM, *words(1, TURN)], 0)
    in_memory = check(warm, [*first, *words(2, TURN)], len(first))
    check(warm, [*SYSTEM, *words(3, TURN)], len(SYSTEM))  # of a snapshot, or of a cache cut back
    ahead = [*in_memory, *words(4, TURN)]
    warm.engine.handle(ComputeAhead("m", ahead, 4096))
    warm.finish()
    last = check(warm, [*ahead, *words(5, TURN)], len(ahead))
    warm.write()
    warm.stop()
    restarted = engines.warm()
    check(restarted, [*SYSTEM, *words(7, TURN)], len(SYSTEM))
    check(restarted, [*last, *words(6, TURN)], len(last))
    assert restarted.total("hits") == 2
    restarted.stop()


def test_a_window_that_was_overwritten_in_place_is_kept_in_order() -> None:
    window = RotatingKVCache(8)
    for token in range(20):
        window.update_and_fetch(*[mx.full((1, 1, 1, 4), token)] * 2)
    arrays = arrays_of({0: window})
    restored = layers_of({0: RotatingKVCache(8)}, arrays, 20)[0]
    assert restored.offset == 20
    assert restored.keys[0, 0, :, 0].tolist() == [*range(12, 20)]
    keys, _ = restored.update_and_fetch(*[mx.full((1, 1, 1, 4), 20)] * 2)
    assert sorted(keys[0, 0, :, 0].tolist()) == [*range(13, 21)]
