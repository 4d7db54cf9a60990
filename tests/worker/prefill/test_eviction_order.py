"""What the prompt cache drops first: whole conversations, the least recently used one before the
others, and a system prompt only after all conversations that begin with it."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mlx_server.worker.prefill.memory_tier import MemoryTier
from tests.worker.batch_runs import a_prompt
from tests.worker.prefill.test_memory_tier import TOKEN, full, recurrent

SYSTEMS = (a_prompt(120, seed=1), a_prompt(90, seed=2))
LONGEST, THOUGHT, MESSAGE = 400, 4, 10
"""Tokens of a whole conversation, of an answer's thoughts, which the next turn drops, and of a
message."""
MOST_TURNS = 12
UNKNOWN = [300] * 50
"""What no conversation has."""


class Conversation:
    def __init__(self, seed: int, system: int) -> None:
        self.random = Random(seed)
        self.system = SYSTEMS[system]
        self.history = [*self.system, seed]  # no two say the same
        self.computed: list[int] = []
        """The prompt and the answer of the last turn."""

    def turn(self, cache: MemoryTier) -> None:
        if self.is_full:
            return
        self.history += self._words(MESSAGE)
        end, shared = len(self.history), len(self.system)
        self.computed = [*self.history, *self._words(THOUGHT)]
        _, known = cache.fetch(("m",), self.computed)
        for place in (shared - MESSAGE, shared, end):  # the tools come before the system prompt
            if place > known:
                layers = [full(place), recurrent(place)]
                cache.store_snapshot(("m",), self.computed[:place], layers, shared)
        length = len(self.computed)
        layers = [full(length), recurrent(length)]
        cache.store(("m",), self.computed, layers, continued_from=end, shared=shared)

    @property
    def is_full(self) -> bool:
        return len(self.history) + 2 * MESSAGE + THOUGHT > LONGEST

    def is_kept(self, cache: MemoryTier) -> bool:
        return bool(self.computed) and cache.known(("m",), self.computed) == len(self.computed)

    def _words(self, count: int) -> list[int]:
        return [self.random.randrange(256) for _ in range(count)]


class Eviction(RuleBasedStateMachine):
    conversations = Bundle("conversations")

    def __init__(self) -> None:
        super().__init__()
        self.cache = MemoryTier(8 * LONGEST * TOKEN)
        self.by_use: list[Conversation] = []
        """The least recently used one first."""
        self.begun = 0
        """How many: two that say the same would be one conversation."""

    @rule(
        target=conversations,
        system=st.sampled_from(range(len(SYSTEMS))),
        turns=st.integers(1, MOST_TURNS),
    )
    def begin(self, system: int, turns: int) -> Conversation:
        self.begun += 1
        return self._turns(Conversation(self.begun, system), turns)

    @rule(target=conversations, each=consumes(conversations), turns=st.integers(1, MOST_TURNS))
    def go_on(self, each: Conversation, turns: int) -> Conversation:
        return self._turns(each, turns)

    @rule(each=conversations)
    def ask_again(self, each: Conversation) -> None:
        if each.is_kept(self.cache):
            self.cache.fetch(("m",), each.computed)
            self._used(each)

    @rule(share=st.floats(0, 1))
    def give_way(self, share: float) -> None:
        self.cache.limit(int(share * self.cache.nbytes))
        self.cache.limit(1 << 30)

    def _turns(self, each: Conversation, turns: int) -> Conversation:
        if each.is_full:
            return each
        if not each.is_kept(self.cache):  # its system prompt comes from another one
            others = (o for o in reversed(self.by_use) if o.system is each.system)
            if served := next((o for o in others if o.is_kept(self.cache)), None):
                self._used(served)
        for _ in range(turns):
            each.turn(self.cache)
        self._used(each)
        return each

    def _used(self, each: Conversation) -> None:
        self.by_use = [other for other in self.by_use if other is not each] + [each]

    @invariant()
    def the_least_recently_used_conversations_are_dropped(self) -> None:
        kept = [each.is_kept(self.cache) for each in self.by_use]
        assert kept == sorted(kept)

    @invariant()
    def a_system_prompt_stays_while_a_conversation_has_it(self) -> None:
        for each in filter(lambda each: each.is_kept(self.cache), self.by_use):
            asked = [*each.system, *UNKNOWN]
            assert self.cache.known(("m",), asked) == len(each.system)

    @invariant()
    def it_keeps_to_its_limit(self) -> None:
        assert self.cache.nbytes <= self.cache.max_bytes


TestEviction = Eviction.TestCase
TestEviction.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


def test_a_long_conversation_keeps_the_system_prompt_of_the_next_one() -> None:
    cache, conversation = MemoryTier(1 << 20), Conversation(1, 0)
    for _ in range(25):
        conversation.turn(cache)
    assert cache.known(("m",), [*conversation.system, *UNKNOWN]) == len(conversation.system)
