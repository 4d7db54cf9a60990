"""Conversations whose earlier thoughts are dropped compute each token once, on every kind of cache,
and answer as an engine without a prompt cache does."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from mlx_server.engine.messages import CancelRows, Generate
from tests.worker.bench import GREEDY, Bench
from tests.worker.kinds import KINDS
from tests.worker.lora_files import network
from tests.worker.one_pass import expected

ONE_OF_EACH = [kind for kind in KINDS if kind.name in ("llama", "gpt-oss", "lfm2")]


@pytest.fixture(scope="module", params=ONE_OF_EACH, ids=lambda kind: kind.name)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(request.param.save(tmp_path_factory.mktemp("sessions") / request.param.name))


TOKENS = 8
"""Of an answer: as many thoughts, which are dropped, as text."""


class Session:
    """A conversation as an agent has it: thoughts of earlier turns are not sent again."""

    TAIL = (301, 302)
    """Opens the answer's thoughts."""

    def __init__(self, random: Random, system: Sequence[int]) -> None:
        self._random = random
        self._system = len(system)
        self._history = list(system)

    def words(self, count: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(count)]

    def prompt(self) -> Generate:
        last_user = len(self._history)
        self._history += self.words(self._random.randint(40, 120))
        end = len(self._history)
        request = Generate(0, "m", [*self._history, *self.TAIL], TOKENS, [], GREEDY)
        request.branches = [self._system, last_user, end]
        request.continued_from = end
        return request

    def answered(self, tokens: Sequence[int]) -> None:
        self._history += tokens[4:]  # the first four are thoughts


class Counted:
    """An engine, and the tokens that it computed although it had computed them before."""

    def __init__(self, path: Path) -> None:
        self.bench = Bench(path, cache_bytes=1 << 30)
        self.prompt_tokens = self.again = 0
        self.answered: list[tuple[list[int], list[int]]] = []
        """Each prompt and its answer."""

    def answer(self, request: Generate) -> list[int]:
        row = self.bench.begin(
            request.prompt, TOKENS, branches=request.branches, continued_from=request.continued_from
        )
        tokens = self.bench.finish()[row]
        ideal = max((_common(request.prompt, [*p, *said]) for p, said in self.answered), default=0)
        computed = len(request.prompt) - self.bench.cached[row]
        self.prompt_tokens += len(request.prompt)
        self.again += computed - (len(request.prompt) - ideal)
        self.answered.append((request.prompt, tokens))
        return tokens


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def turns(seed: int, count: int) -> Iterator[Session]:
    """Whose turn it is: two sessions with one system prompt."""
    random = Random(seed)
    system = [random.randrange(256) for _ in range(200)]
    sessions = [Session(random, system) for _ in range(2)]
    for turn in range(count):
        yield sessions[turn % 2]


@pytest.fixture(scope="module")
def engine(path: Path) -> Counted:
    """Has answered the turns of two sessions."""
    engine = Counted(path)
    for session in turns(seed=1, count=12):
        session.answered(engine.answer(session.prompt()))
    return engine


def test_each_token_is_computed_once(engine: Counted) -> None:
    # the prompt's last token is always computed, and no place is kept right before another one
    assert engine.again <= 0.02 * engine.prompt_tokens


@pytest.mark.slow
def test_a_place_where_prompts_have_parted_is_known_the_next_time(path: Path) -> None:
    engine, model = Counted(path), network(path)
    random = Random(3)
    shared = [random.randrange(256) for _ in range(250)]
    prompts = [[*shared, *(random.randrange(256) for _ in range(60))] for _ in range(4)]
    for prompt in prompts:
        answer = engine.answer(Generate(0, "m", prompt, TOKENS, [], GREEDY))
        assert answer == expected(model, prompt, answer, TOKENS)
    assert engine.again <= len(shared) + 4, "only the first parting computes them again"


@pytest.mark.slow
def test_a_prompt_whose_client_left_goes_on_where_it_was(path: Path) -> None:
    warm = Bench(path, cache_bytes=1 << 30)
    random = Random(4)
    prompt = [random.randrange(256) for _ in range(600)]
    row = warm.begin(prompt, TOKENS)
    while not warm.cached:
        warm.step()
    warm.engine.handle(CancelRows([row]))
    again = warm.begin(prompt, TOKENS)
    answer = warm.finish()[again]
    assert warm.cached[again] > 0
    assert answer == expected(network(path), prompt, answer, TOKENS)
