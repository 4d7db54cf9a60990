"""The rows of one model: waiting prompts, prompts in prefill and decoding rows.

mlx-lm's BatchGenerator prefills up to eight prompts together, so that none gets a token before all
are done, and samples row by row. Here the `PromptScheduler` decides whose prompt is computed next,
the `PrefillBudget` how much of it is computed before the decoding rows get their next token, and
one `Sampler` samples for all rows at once.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from msgspec import structs

from mlx_server.engine.messages import (
    Generate,
    Prefilled,
    PrefillProgress,
    RowFailed,
    RowLeftGrammar,
    Token,
)
from mlx_server.fair_queue import address_of
from mlx_server.loops import LoopDetector
from mlx_server.requests import Tier
from mlx_server.worker.constrained_decoding.logit_constraints import LogitConstraint
from mlx_server.worker.costs import CostCurve, Drift, StepCosts, step_costs
from mlx_server.worker.decode_groups import DecodeBatch, DecodeGroups, PrefillBatch
from mlx_server.worker.encoders import Encoder
from mlx_server.worker.forward_pass import at_ends, heads_of
from mlx_server.worker.kernels import has_gpu
from mlx_server.worker.kv_caches import make_caches, why_alone
from mlx_server.worker.prefill.schedule import (
    DEFAULT_SCHEDULE,
    PrefillBudget,
    PrefillPiece,
)
from mlx_server.worker.prefill_groups import (
    PrefillGroup,
    PrefillGroups,
    PromptQueue,
    WaitingPrompt,
)
from mlx_server.worker.prompt_store import PromptStore, RowPrompts
from mlx_server.worker.replay_model import ReplayModel
from mlx_server.worker.row import EXPERTS_PIECE, FIXED_PIECE, Row
from mlx_server.worker.sight import row_pictures
from mlx_server.worker.speculation.draft import Drafter
from mlx_server.worker.speculation.gate import Gate

MOST_TOGETHER = 32
"""Prompts of which more than fit into a piece are computed in the same ones."""

LOW_PIECE = 0.1
"""The largest share of a whole prompt's time that a piece below the usual tier takes: a request of
a higher one may come and wait for its end."""

IS_LAUNCHED_AHEAD = has_gpu()
"""Whether a pass is computed while the host goes on. MLX's CPU computes it within its launch, so
that first tokens are sent before the next one."""

COMPARED = 1024
"""The tokens of the longest row of a step that is compared with the cost curve."""


@dataclass
class StepResult:
    """The results of one step of a batch."""

    tokens: list[Token] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    failed: list[RowFailed | RowLeftGrammar] = field(default_factory=list)
    """Rows that have left the batch."""
    has_piece: bool = False
    """Whether a piece of a prompt was computed, for which all other rows have waited."""


class Places:
    """Decides whether there is room to begin while others decode: a batch has places for a number
    of rows. Which prompt is the next one, `FairQueue` says.
    """

    def __init__(self, count: int, decoding: DecodeGroups) -> None:
        self._count = count
        self._decoding = decoding
        self.kept = Counter[str]()
        """The rows that wait for their masks, by client: its further rows don't take their places,
        and where there is only one place, no row does."""

    @property
    def free(self) -> int:
        """The number of places that no decoding row has."""
        return self._count - len(self._decoding)

    def fit(self, waiting: WaitingPrompt | PrefillGroup) -> bool:
        places = self.kept.total() if self._count == 1 else self.kept[waiting.client]
        return len(waiting.rows) <= self.free - places

    @property
    def may_begin(self) -> Callable[[WaitingPrompt | PrefillGroup], bool]:
        """Whether a prompt may begin, as long as the same rows decode: what is to know of them is
        found once, for all prompts that don't fit."""
        yielding = cache(lambda: self.yielding)
        return lambda waiting: self.fit(waiting) or yielding()(waiting) is not None

    @property
    def yielding(self) -> Callable[[WaitingPrompt | PrefillGroup], int | None]:
        """Returns the row to set aside for a prompt: the youngest of the lowest tier, if that is a
        lower one. Or for a client that has none the youngest of the client with the most rows, if
        that one has several; or else, if its address has none, of the address.

        So a model that is computed one row at a time finishes its row first: taking turns would
        copy a row's whole cache each time, and keep two caches where one is reserved.
        """
        rows = self._decoding.rows
        lowest = max(rows, key=lambda row: (row.tier, row.number), default=None)
        youngest = list[tuple[Callable[[str], str], Counter[str], int]]()
        for of in (str, address_of):
            decoding = Counter(of(row.client) for row in rows)
            ((most, count),) = decoding.most_common(1) or [("", 0)]
            if count > 1:
                number = max(row.number for row in rows if of(row.client) == most)
                youngest.append((of, decoding, number))

        def yielding(waiting: WaitingPrompt | PrefillGroup) -> int | None:
            if len(waiting.rows) > 1:
                return None
            if lowest and lowest.tier > waiting.tier and self._count > 1:
                return lowest.number
            others = (row for of, had, row in youngest if of(waiting.client) not in had)
            return next(others, None)

        return yielding


class Preempted:
    """Rows whose caches were freed to make room for others, and what they need to resume.

    A row that had tokens keeps its sampler, its grammar and the token that it drew last. To resume,
    it computes the cache of all tokens before that one, except what the prompt cache has, and then
    decodes as if it had not been preempted.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, WaitingPrompt] = {}
        """The prompts of all rows of a batch, by number."""
        self._waiting: dict[int, WaitingPrompt] = {}
        """The prompts of the preempted rows, by number."""

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    @property
    def rows(self) -> list[Row]:
        return [waiting.row for waiting in self._waiting.values()]

    def add(self, waiting: WaitingPrompt) -> None:
        self._prompts[waiting.number] = waiting

    def remove(self, number: int) -> None:
        self._prompts.pop(number, None)
        self._waiting.pop(number, None)

    def prefilling(self, number: int) -> None:
        """Preempts a row whose prompt is not fully computed; its prefill will start again."""
        prompt = replace(self._prompts[number], cache=None, known=0)
        self._prompts[number] = self._waiting[number] = prompt

    def decoding(self, one: DecodeBatch) -> None:
        """Preempts a row that decoded. one: a batch of this row alone, whose cache is dropped."""
        (number,), (tokens,), (unfed,) = one.uids, one.tokens, one.unfed
        one.prompt_cache = []
        tokens += unfed
        unfed.clear()
        ids = [*tokens, *cast(list[int], one._next_tokens.tolist())]
        prompt = replace(self._prompts[number], prompt=ids, cache=None, known=0, decode=one)
        self._prompts[number] = self._waiting[number] = prompt

    def decode(self, rows: list[Row]) -> None:
        """Notes that rows decode: their prompts drop the references that would keep old caches."""
        for row in rows:
            prompt = self._prompts[row.number]
            prompt.decode = prompt.cache = None

    def resumed(self, number: int) -> WaitingPrompt | None:
        return self._waiting.pop(number, None)


class Batch:
    """Rows join and leave at any step; `step` gives each decoding row its next token."""

    def __init__(
        self,
        model: nn.Module,
        *,
        concurrency: int,
        prompts: PromptStore | None = None,
        held: Collection[int] = (),
        budget: PrefillBudget | None = None,
        costs: StepCosts | None = None,
        most_padding: int | None = None,
        gate: Gate | None = None,
        drafter: Callable[[Row, Gate], Drafter] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """held: the paused rows, a set that the caller changes; they get no tokens.
        costs: what a step of the model costs, by default what its arrays say.
        most_padding: the tokens by which groups of decoding rows may be padded.
        gate: decides about drafts; None: rows get one token a pass. drafter: makes a row's."""
        self.model = model
        self._held = held
        self.aside: list[DecodeBatch] = []
        """Decoding rows that were set aside, each as a batch of one row."""
        self._begun: list[int] = []
        """The rows that have begun in the last step, whose prompts are not stored yet."""
        self.why_alone = why_alone(model)
        """Why rows are computed one at a time; empty if they can share a batch."""
        self._cache = RowPrompts(prompts or PromptStore(0), make_caches(model))
        self._costs = costs = costs or step_costs(model)
        self._budget = budget or PrefillBudget(DEFAULT_SCHEDULE, costs.curve)
        self._budgets = {Tier.DEFAULT: self._budget}
        """By tier. Those of other tiers know what the first one does."""
        self._tier = Tier.DEFAULT
        """The tier that the latest step served."""
        self.drift = Drift()
        self._clock = clock
        self._turns: PromptQueue = PromptQueue()
        self._group: PrefillGroup | None = None
        """The prompts in prefill."""
        self._new_drafter = drafter
        self.decoder = DecodeGroups(costs, most_padding, gate, clock)
        self._places = Places(1 if self.why_alone else concurrency, self.decoder)
        self._preempted = Preempted()
        self._began = 0.0
        self.shared = False
        """Whether rows of other models are decoding."""
        self.waited_for_piece = False
        """Whether any model has computed a piece of a prompt since the rows here had a token."""
        self.is_launched_ahead = IS_LAUNCHED_AHEAD
        self.warm = False
        """Whether it has generated a token, so that its kernels are compiled."""
        heads = heads_of(model)
        # Both show in the shape of an output that is never computed.
        with at_ends(heads, [2]):
            _, computed, self.vocabulary = model(mx.array([[0, 0]])).shape
        # Layers that can't batch may compute a token otherwise in a pass of several, as phi3small.
        may_end = computed == 1 and self._cache.can_be_cut and not self.why_alone
        may_end = may_end and costs.is_alike  # ranks that decide otherwise wait for ever
        self._budget.depth = len(model.layers) if may_end else 0
        one_at_a_time = bool(self.why_alone)
        self._groups = PrefillGroups(
            model, self._cache, heads if may_end else (), one_at_a_time=one_at_a_time
        )

    def __bool__(self) -> bool:
        """Whether a row can be stepped, one that is neither paused nor preempted."""
        return bool(self._turns or self.decoder or self._group or self._returning)

    @property
    def plays(self) -> bool:
        return isinstance(self.model, ReplayModel)

    @property
    def encodes(self) -> bool:
        """Whether the model has no output but vectors of whole texts."""
        return isinstance(self.model, Encoder)

    @property
    def decoding(self) -> int:
        return len(self.decoder)

    @property
    def tiers(self) -> set[Tier]:
        """The tiers of the rows and prompts that can be stepped."""
        waiting = (prompt.tier for prompt in filter(self._places.may_begin, self._turns))
        prefilling = {self._group.tier} if self._group else set[Tier]()
        returning = (one.samplers[0].tier for one in self._returning)
        return {*self.decoder.tiers, *waiting, *prefilling, *returning}

    def is_overdue(self, tier: Tier) -> bool:
        """Whether the tier's rows get a token before any model computes another piece of a
        prompt."""
        return self.waited_for_piece and tier in self.decoder.tiers

    def is_late(self, tier: Tier) -> bool:
        """Whether the tier's rows have waited for the longest gap, for steps of other models
        too."""
        waited = self._clock() - self._began
        return tier in self.decoder.tiers and waited >= self._budget.schedule.longest_gap

    def may_prefill(self, tier: Tier) -> bool:
        """Whether a step of the tier may compute a piece of a prompt."""
        return bool(self.next_prompt(tier)) and not self.is_overdue(tier)

    @property
    def rows(self) -> list[int]:
        return [row.number for row in self.all_rows]

    @property
    def all_rows(self) -> list[Row]:
        waiting = [row for waiting in self._turns for row in waiting.rows]
        aside = [row for one in self.aside for row in one.samplers]
        preempted = self._preempted.rows
        return [*waiting, *self.prefilling, *self.decoder.rows, *aside, *preempted]

    @property
    def prefilling(self) -> list[Row]:
        """The rows whose prompts are being computed."""
        return self._group.rows if self._group else []

    @property
    def _returning(self) -> list[DecodeBatch]:
        free = (one for one in self.aside if one.uids[0] not in self._held)
        return [one for one in free if not one.samplers[0].is_waiting]

    @property
    def waiting(self) -> int:
        """The number of rows without a token yet."""
        return sum(len(waiting.rows) for waiting in self._turns) + len(self.prefilling)

    @property
    def ready_at(self) -> float:
        """The time at which the next step is due by the batch's clock: later than now during a
        replay delay."""
        return self._began + max((row.request.delay for row in self.decoder.rows), default=0.0)

    def add(
        self,
        request: Generate,
        cache: list[Any] | None = None,
        constraint: LogitConstraint | None = None,
    ) -> None:
        """cache: the cache of the whole prompt but its last token, if it has been computed."""
        row = Row(request, self.vocabulary)
        row.pictures = row_pictures(self.model, request)
        row.fixed_piece = EXPERTS_PIECE if self._costs.has_experts else FIXED_PIECE
        self._cache.add_places(row)
        row.constraint = constraint
        gate, may_draft = self.decoder.gate, row.may_draft and not self.why_alone
        if gate and self._new_drafter and may_draft and (self.plays or gate.is_known):
            row.drafter = self._new_drafter(row, gate)
        self._follow(row)
        tokens = request.tokens
        known = len(tokens) - 1 if cache is not None else self._cache.known(row, tokens[:-1])
        waiting = WaitingPrompt(row, tokens, cache, known)
        self._preempted.add(waiting)
        self._turns.add(waiting)

    def _follow(self, row: Row) -> None:
        """Takes what constrains and ends the row to where another engine left it. Its last token is
        the input of the next step, in which the constraint advances by it."""
        for at, token in enumerate(row.request.generated):
            if row.constraint:
                row.constraint.follow(row.request.generated[at - 1] if at else None)
            if row.loops and row.loops.add(token):
                self._ended(row, row.loops, Token(row.number, token))

    def preempt(self, number: int) -> None:
        """Frees a row's cache, or moves it to the prompt cache if there is room; the row waits for
        `resume`."""
        if number in self.decoder:
            self._store(*self.decoder.place(number))
            self._preempted.decoding(self.decoder.part_without_cache(number))
        elif aside := next((one for one in self.aside if one.uids[0] == number), None):
            self.aside.remove(aside)
            self._store(aside, 0)
            self._preempted.decoding(aside)
        elif number in self.rows and number not in self._preempted:
            self._leave(number)
            self._preempted.prefilling(number)

    def resume(self, number: int) -> None:
        if waiting := self._preempted.resumed(number):
            self._cache.hold(waiting.row, waiting.prompt[:-1])
            waiting.known = self._cache.known(waiting.row, waiting.prompt[:-1])
            self._turns.add(waiting)

    def cancel(self, number: int) -> None:
        for row in self.all_rows:
            if row.number == number and row.constraint:
                row.constraint.abandon()
        self._leave(number)
        self._preempted.remove(number)

    def _leave(self, number: int) -> None:
        if number in self.decoder:
            group, at = self.decoder.place(number)
            tokens, row, alone = group.tokens[at], group.samplers[at], len(group) == 1
            cache = group.extract_cache(at) if self._cache.wants(row, tokens) else []
            self.decoder.part_without_cache(number)
            self._cache.store(row, tokens, lambda: cache, handed_over=alone)
        elif self._group and number in self._group.batch.uids:
            self._cancel_in(self._group, number)
            if not self._group.rows:
                self._turns.end()
                self._group = None
        else:
            self._cancel_waiting(number)
            self.aside = [one for one in self.aside if one.uids[0] != number]

    def _cancel_waiting(self, number: int) -> None:
        for waiting in [w for w in self._turns if number in [row.number for row in w.rows]]:
            if isinstance(waiting, PrefillGroup):
                self._cancel_in(waiting, number)
            if isinstance(waiting, WaitingPrompt) or not waiting.rows:
                self._turns.remove(waiting)

    def step(self, tier: Tier | None = None) -> StepResult:
        """Computes a token for every decoding row of a tier, or a piece of its next prompt. The two
        alternate, so that tokens are sent while a piece is computed. tier: by default the highest
        one."""
        done = StepResult()
        self._store_begun()
        self._change_rows(done)
        self._start_decoding(done)
        tier = min(self.tiers, default=Tier.DEFAULT) if tier is None else tier
        if tier is not self._tier:
            self._budget_of(tier).interrupted()
            self._tier = tier
        following = self.next_prompt(tier)
        if following and (tokens := self._tokens_of_piece(following)):
            if following is not self._group:
                self._begin(following, tokens, done)
            if tier not in self.decoder.tiers:
                self._began = self._clock()
            self._prefill_piece(tokens, done)
        elif tier in self.decoder.tiers:
            self._decode_step(tier, done)
        self._set_late_aside()
        aside = [one.samplers[0] for one in self.aside]
        self._drop_failed([*self.decoder.rows, *aside], done)
        return done

    def _set_late_aside(self) -> None:
        """Takes the rows out of decoding that wait for their masks."""
        self.set_aside([row.number for row in self.decoder.rows if row.late])
        self._count_late()

    def _count_late(self) -> None:
        rows = (one.samplers[0] for one in self.aside)
        self._places.kept = Counter(row.client for row in rows if row.late)

    def set_aside(self, numbers: Collection[int]) -> None:
        """Takes rows out of decoding; they keep their caches and return when there is room."""
        if numbers:
            self.aside += self.decoder.parts(numbers)

    def _change_rows(self, done: StepResult) -> None:
        """Takes paused rows out of decoding and returns others to it if there is room."""
        self.set_aside([row.number for row in self.decoder.rows if row.number in self._held])
        for one in self._returning:
            (row,) = one.samplers
            newcomers = {waiting.client for waiting in self._turns} - self._served.keys()
            wanted = len(newcomers) if row.client in self._served and not row.late else 0
            higher = sum(len(each.rows) for each in self._turns if each.tier < row.tier)
            wanted = max(wanted, higher)
            if self._room <= wanted or row.failure or self._ends_late(row, done):
                continue
            if row.late:
                one.draw_late()
            self.aside.remove(one)
            self.decoder.extend(one)
            self._count_late()

    @property
    def _room(self) -> int:
        """The number of rows that may still begin."""
        return self._places.free - len(self.prefilling)

    @property
    def _served(self) -> Counter[str]:
        """The number of rows in prefill or decoding, by client."""
        return Counter(row.client for row in [*self.decoder.rows, *self.prefilling])

    def next_prompt(self, tier: Tier) -> WaitingPrompt | PrefillGroup | None:
        """Returns the tier's prompt that is computed next: the present one, or another."""
        has_room = self._places.may_begin

        def may_begin(prompt: WaitingPrompt | PrefillGroup) -> bool:
            return prompt.tier is tier and has_room(prompt)

        if self._group is None or self._group.tier is not tier:
            return self._turns.next(may_begin)
        return self._turns.instead_of(self._group, may_begin) or self._group

    def _budget_of(self, tier: Tier) -> PrefillBudget:
        if tier not in self._budgets:
            most = LOW_PIECE if tier > Tier.DEFAULT else inf
            self._budgets[tier] = self._budget.of_others(most)
        return self._budgets[tier]

    def _tokens_of_piece(self, following: WaitingPrompt | PrefillGroup) -> int:
        tier = following.tier
        rows, context = len(following.rows), following.context
        waiting = [len(each.rows) for each in self._turns if each.tier is tier]
        waiting += [len(self.prefilling)] if self._group and self._group.tier is tier else []
        left, budget = following.padded_left, self._budget_of(tier)
        if budget.ends(PrefillPiece(rows, left // rows + 1, context)):
            left += rows
        shared = self.shared or tier > Tier.DEFAULT
        return budget.piece(
            len(self.decoder.served(tier)),
            min(sum(waiting), self._places.free),
            rows,
            context,
            left=left,
            shared=shared,
            overdue=self.is_overdue(tier),
            gathers=not (shared or self.is_launched_ahead),
        )

    def _decode_step(self, tier: Tier, done: StepResult) -> None:
        served = self.decoder.served(tier)
        self._began, count = self._clock(), len(served)
        self.waited_for_piece = False
        rows = {row.number: row for row in served}
        decided = done.tokens
        done.tokens = [
            self._token(rows, response, alone=alone) for response, alone in self.decoder.next(tier)
        ]
        self.warm = self.warm or bool(done.tokens)
        self._drop_failed(list(rows.values()), done)
        tokens = [self._unlooped(rows[token.row], token) for token in done.tokens]
        tokens = [token for token in tokens if not rows[token.row].was_sent()]
        done.tokens = decided + [each for each in tokens if not rows[each.row].undecided]
        for token in reversed(tokens):  # the last one of a pass says how its drafts fared
            row = rows[token.row]
            token.drafts, row.drafts = row.drafts, None
        seconds = self._clock() - self._began
        budget = self._budget_of(tier)
        budget.stepped(self.decoder.positions, seconds)
        if self.decoder.positions > count or count < len(self.decoder):
            return
        if self._costs.curve.known and budget.is_steady:
            self._compare(count, seconds)

    def _compare(self, count: int, seconds: float) -> None:
        """Compares a step of short rows, whose keys and values take little time, with the curve."""
        groups = self.decoder.lengths
        if len(groups) == 1 and len(groups[0]) == count and max(groups[0]) <= COMPARED:
            self.drift.add(seconds / self._costs.curve.step(count))

    def use(self, curve: CostCurve) -> None:
        """Decides by another curve from now on."""
        self._costs.curve, self.drift = curve, Drift()
        self._budget.use(curve)
        self._budgets = {Tier.DEFAULT: self._budget}
        if self.decoder.gate:
            self.decoder.gate.use(curve)

    def _drop_failed(self, rows: list[Row], done: StepResult) -> None:
        for row, failure in [(row, row.failure) for row in rows if row.failure]:
            self.cancel(row.number)
            done.tokens = [token for token in done.tokens if token.row != row.number]
            done.failed.append(row.failed(failure))
            if row.error:  # its cached values may be invalid too
                self._cache.forget(row)

    def _token(self, rows: dict[int, Row], response: Any, *, alone: bool) -> Token:
        if response.finish_reason is not None:
            self._preempted.remove(response.uid)
            row = rows[response.uid]  # a finished row is no longer in the batch
            if row.constraint:
                row.constraint.abandon()
            cache = response.prompt_cache
            self._cache.store(row, response.all_tokens, lambda: cache, handed_over=alone)
        return Token(response.uid, response.token, response.finish_reason, response.logprobs)

    def _unlooped(self, row: Row, token: Token) -> Token:
        """Ends a row that repeats itself: its reasoning where a grammar demands an answer, and what
        the grammar demands besides by the shortest way."""
        if token.finish and row.constraint and row.constraint.loop:
            return structs.replace(token, looped=row.constraint.loop)
        if token.finish or row.loops is None or not row.loops.add(token.id):
            return token
        if row.is_waiting:  # only the matcher knows, which another thread uses
            row.undecided = token
            return token
        return self._ended(row, row.loops, token)

    def _ends_late(self, row: Row, done: StepResult) -> bool:
        """Whether the row ends with the token whose loop could not be judged while its mask was
        made."""
        token, row.undecided = row.undecided, None
        if token is None or row.loops is None:
            return False
        done.tokens.append(self._ended(row, row.loops, token))
        return done.tokens[-1].finish is not None

    def _ended(self, row: Row, loops: LoopDetector, token: Token) -> Token:
        if row.constraint and row.constraint.demands_more:
            if row.constraint.end_reasoning():
                row.loops = LoopDetector(loops.repeats)
                return structs.replace(token, looped=loops.period)
            row.constraint.end_answer(loops.period)
            return token
        self.cancel(row.number)
        return structs.replace(token, finish="stop", looped=loops.period)

    def _begin(
        self, following: WaitingPrompt | PrefillGroup, tokens: int, done: StepResult
    ) -> None:
        """Starts or continues a prompt; the present one returns to the queue with its cache."""
        if self._group:
            self._turns.end()
            self._turns.add(self._group)
            self._group = None
        if not self._places.fit(following):
            yielding = self._places.yielding(following)
            assert yielding is not None, "there is no room for this prompt"
            self.set_aside([yielding])
        self._turns.begin(following)
        if isinstance(following, PrefillGroup):
            self._group = following
        else:
            tokens, room = self._together(following, tokens)
            self._group, begun = self._groups.make(following, self._turns, tokens, room)
            done.prefilled += begun

    def _together(self, first: WaitingPrompt, tokens: int) -> tuple[int, int]:
        """Returns how many tokens the prompts have that are computed in the same pieces, at most,
        and how many these are."""
        waiting = (w for w in self._turns if isinstance(w, WaitingPrompt) and not w.is_alone)
        others = [w.left for w in waiting if w.tier is first.tier]
        left = [first.left, *sorted(others)][: min(self._room, MOST_TOGETHER)]
        decoding, budget = len(self.decoder.served(first.tier)), self._budget_of(first.tier)
        if first.is_alone or not (count := budget.together(decoding, left, tokens)):
            return tokens, self._room
        return max(tokens, count * max(left[:count])), count

    def _prefill_piece(self, tokens: int, done: StepResult) -> None:
        """Computes about `tokens` prompt tokens; rows with only a last token left then decode."""
        assert self._group
        done.has_piece = True
        group, context, began = self._group, self._group.context, self._clock()
        decoding = len(self.decoder.served(group.tier))
        most = self._budget.schedule.longest_gap / 2 if self.decoder else inf
        if group.encode_picture(lambda: self._clock() - began >= most):
            self._budget_of(group.tier).prefilled(None, decoding, self._clock() - began)
            return
        sizes = group.compute(tokens, self._budget_of(group.tier).ends)
        if max(sizes):
            piece = PrefillPiece(len(sizes), max(sizes) + group.has_ended, context)
            self._budget_of(group.tier).prefilled(piece, decoding, self._clock() - began)
        for at, (row, size) in enumerate(zip(group.rows, sizes, strict=True)):
            self._turns.computed(group, row.client, size)
            if size and group.resumed is None:
                done.progress.append(PrefillProgress(row.number, len(group.batch.tokens[at])))
            if size:
                extracted = partial(group.batch.extract_cache, at)
                self._cache.store_snapshot(row, group.batch.tokens[at], extracted)
        self._start_decoding(done)

    def _cancel_in(self, group: PrefillGroup, number: int) -> None:
        """Keeps the computed part of the prompt: the client may send it again."""
        self._store(group.batch, group.batch.uids.index(number))
        group.cancel(number)

    def _store(self, batch: PrefillBatch | DecodeBatch, at: int, *, goes_on: bool = False) -> None:
        extracted = partial(batch.extract_cache, at)
        self._cache.store(batch.samplers[at], batch.tokens[at], extracted, goes_on=goes_on)

    def _start_decoding(self, done: StepResult) -> None:
        """Moves prompts that are computed to the decoding rows, unless those get a token first."""
        group = self._group
        if not group or not group.is_computed:
            return
        decoding, rows = len(self.decoder.served(group.tier)), len(group.rows)
        budget = self._budget_of(group.tier)
        own = not group.has_ended
        if decoding and budget.is_step_first(group.context, rows, decoding, own=own):
            return
        if group.resumed is None and self._cache.can_be_cut:
            self._begun += [row.number for row in group.rows]
        elif group.resumed is None:  # states of all but the last token: the prompt may come again
            self._store_going_on(group.batch, group.batch.uids)
        begun = group.decode()
        if group.resumed is None and not self.is_launched_ahead:
            done.tokens += begun.first_tokens()
        self.decoder.extend(begun)
        self._set_late_aside()  # a preempted row may still wait for its mask
        budget.joined(len(group.rows), own=own, sent=not self.is_launched_ahead)
        self._preempted.decode(group.rows)
        self._turns.end()
        self._group = None

    def _store_begun(self) -> None:
        """Stores the prompts of rows that have just begun: by now their first tokens are sent."""
        for group in [*self.decoder.groups, *self.aside] if self._begun else ():
            self._store_going_on(group, self._begun)
        self._begun = []

    def _store_going_on(self, batch: PrefillBatch | DecodeBatch, numbers: Collection[int]) -> None:
        """Stores what is computed of these rows, which go on, and looks up again what is cached of
        the waiting prompts that may share more with them."""
        begun = []
        for at, (row, tokens) in enumerate(zip(batch.samplers, batch.tokens, strict=True)):
            if row.number in numbers:
                self._store(batch, at, goes_on=True)
                begun.append(tokens)
        for waiting in self._turns:
            if isinstance(waiting, WaitingPrompt) and any(map(waiting.may_share_more, begun)):
                known = self._cache.known(waiting.row, waiting.prompt[:-1])
                waiting.known = max(waiting.known, known)
