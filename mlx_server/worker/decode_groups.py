"""The decoding rows of a model, in groups of similar lengths, each of which is a batch of mlx-lm's.

A batch pads its rows to the longest. MLX's attention reads the padding too: its kernel for long
contexts loads keys and values before it looks at the mask. Rows in another batch have less padding,
and another pass costs what the model's cost curve says. A step of the rows is a step of each group.

mlx-lm's batches, one for prefill and one for decoding, carry the Row objects as their per-row
"samplers", so that rows, and the adapters that they name, are merged and filtered together with the
caches.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import Logprobs, Token
from mlx_server.requests import Tier
from mlx_server.worker.constrained_decoding.logit_constraints import AdditiveMask, Mask
from mlx_server.worker.constrained_decoding.mask_threads import SlowMask
from mlx_server.worker.costs import StepCosts
from mlx_server.worker.forward_pass import RowAdapters, at_ends, packed, seeing, using
from mlx_server.worker.mlx_lm_internals import GenerationBatch, PromptProcessingBatch
from mlx_server.worker.prefill.memory_tier import can_always_be_cut
from mlx_server.worker.ragged_caches import (
    RecurrentStates,
    can_take_back,
    is_padded,
    ragged,
    take_back,
)
from mlx_server.worker.row import LateDraw, Row
from mlx_server.worker.sampling import RowLogprobs, Sampled, Sampler, sample_rows_alone
from mlx_server.worker.speculation.draft import Draft
from mlx_server.worker.speculation.draft_pass import DraftPass, RowPass
from mlx_server.worker.speculation.gate import Gate

log = logging.getLogger("mlx_server.engine")

Clock = Callable[[], float]

PER_ROW = (
    *("uids", "tokens", "samplers", "logits_processors", "max_tokens", "stop_sequences"),
    *("_next_logprobs", "_token_context", "_num_tokens", "_matchers", "unfed"),
)
"""The attributes of a batch that are lists with one entry for each row."""


class DecodeBatch(GenerationBatch):
    # The types of mlx-lm's own state that is used here.
    uids: list[int]
    tokens: list[list[int]]
    samplers: list[Row]
    prompt_cache: list[Any]
    _next_tokens: mx.array
    _next_logprobs: list[RowLogprobs | None]
    _num_tokens: list[int]
    max_tokens: list[int]

    vocabulary: int
    """The width of the logits."""
    _made: tuple[Sampler, RowAdapters] | None = None
    _can_draft: bool | None = None
    """Whether its caches can give tokens back; None: not known yet."""

    def __init__(
        self,
        model: nn.Module,
        uids: list[int],
        *rest: Any,
        logits: mx.array | None = None,
        **named: Any,
    ) -> None:
        """logits: what follows the first inputs, [rows, vocabulary], if the caches have these."""
        self._logits = logits
        self.unfed: list[list[int]] = [[] for _ in uids]
        """The tokens of each row that its caches don't have: they were taken back from recurrent
        states."""
        self.is_read = False
        """Whether the next tokens are known here, and not only to the device."""
        super().__init__(model, uids, *rest, **named)

    def extend(self, batch: "DecodeBatch") -> None:
        self.unfed += batch.unfed
        self.is_read = self.is_read and batch.is_read
        if is_padded(self.prompt_cache) != is_padded(batch.prompt_cache):
            for each in (self, batch):
                each.prompt_cache = [ragged(cache) for cache in each.prompt_cache]
        super().extend(batch)

    def filter(self, keep: list[int]) -> None:
        self.unfed = [self.unfed[at] for at in keep]
        super().filter(keep)

    def read(self) -> list[int]:
        """Returns the tokens that were drawn last; waits for them."""
        self.is_read = True
        return cast(list[int], self._next_tokens.tolist())

    def first_tokens(self) -> list[Token]:
        """Returns the first tokens of rows that have just begun, but for those that end with it or
        have none yet. `next` returns them again."""
        return [
            Token(row.number, token, None, entry() if entry else None)
            for row, token, entry in zip(
                self.samplers, self.read(), self._next_logprobs, strict=True
            )
            if row.begins_with(token)
        ]

    def drafts(self, gate: Gate, costs: StepCosts, clock: Clock) -> list[list[int]] | None:
        """Returns what each row is to send of its draft; None if a plain pass is better.

        After a plain pass the newest tokens are unread. They are read only if drafts in their place
        promise enough: plain passes are launched ahead."""
        is_again = any(self.unfed)
        if not is_again and not self._may_draft:
            return None
        widths, drafts = self._drafted(gate, costs, clock)
        if not self.is_read and any(width > 1 for width in widths):
            self.read()
            widths, drafts = self._drafted(gate, costs, clock)
        elif not self.is_read:
            widths = [0] * len(widths)
        if not is_again and not any(widths):
            return None
        return [
            self._until_stop(row, token, draft.tokens[:width]) if draft else []
            for row, token, draft, width in zip(
                self.samplers, self.read(), drafts, widths, strict=True
            )
        ]

    @property
    def _may_draft(self) -> bool:
        if self._can_draft is None:
            self._can_draft = can_take_back(self.prompt_cache)
        is_wanted = self._can_draft and any(row.drafter for row in self.samplers)
        constraints = [row.constraint for row in self.samplers if row.constraint]
        return is_wanted and all(constraint.is_quick for constraint in constraints)

    def _drafted(
        self, gate: Gate, costs: StepCosts, clock: Clock
    ) -> tuple[list[int], list[Draft | None]]:
        """Returns the rows' drafts, and how many tokens of each to send."""
        most = gate.most(len(self)) if self._may_draft else 0
        end = clock() + DRAFT_SECONDS
        drafts = [
            self._draft(at, row, most) if row.drafter and clock() < end else None
            for at, row in enumerate(self.samplers)
        ]
        if not any(drafts):
            return [0] * len(drafts), drafts
        columns = len(self) * max(map(len, self.tokens))
        is_launched = not any(row.constraint for row in self.samplers)
        extra = costs.reading(self.prompt_cache, columns)
        return gate.widths(drafts, extra, launched=is_launched), drafts

    def _draft(self, at: int, row: Row, most: int) -> Draft | None:
        assert row.drafter
        room = self.max_tokens[at] - self._num_tokens[at] - 1
        room = room if row.loops is None else min(room, row.loops.room - 1)
        room = min(room, most) if len(self.unfed[at]) <= MOST_UNFED else 0
        try:
            if news := self._answer_since(at, row.followed):
                row.drafter.extend(news)
                row.followed += len(news)
            return row.drafter.draft(room) if room > 0 else None
        except Exception:
            log.warning("row %d gets no more drafts", row.number, exc_info=True)
            row.drafter = None
            return None

    def _answer_since(self, at: int, begin: int) -> list[int]:
        """Returns the known tokens of a row after the first `begin` ones of its answer."""
        begin += len(self.samplers[at].request.prompt)
        tokens, unfed = self.tokens[at], self.unfed[at]
        known = tokens[begin:] + unfed[max(0, begin - len(tokens)) :]
        is_new = self.is_read and begin <= len(tokens) + len(unfed)
        return [*known, self.read()[at]] if is_new else known

    def _until_stop(self, row: Row, following: int, draft: list[int]) -> list[int]:
        """Cuts a draft after its first stop token, and before one outside of the vocabulary, such
        as a picture's: MLX does not check indices. It is empty after a stop token, so that a
        recurrent state that ends with it can be continued."""
        stops = row.request.stop_tokens
        if following in stops:
            return []
        for n, token in enumerate(draft):
            if token >= self.vocabulary:
                return draft[:n]
            if token in stops:
                return draft[: n + 1]
        return draft

    def next_of(self, drafts: list[list[int]], costs: StepCosts) -> list[Any]:
        """Computes a pass in which each row brings a draft, perhaps an empty one. Returns mlx-lm's
        responses, several for a row whose draft held."""
        parts = zip(self.samplers, self.unfed, self.read(), drafts, strict=True)
        drafted = DraftPass([RowPass(*part) for part in parts], self.vocabulary)
        self.prompt_cache = [ragged(cache) for cache in self.prompt_cache]
        states = RecurrentStates(self.prompt_cache, drafted.lengths)
        padding = costs.curve.padding(sum(drafted.lengths))
        adapters = using(self._for_rows()[1], self.model)
        with adapters, _seeing(self), packed(drafted.lengths, padding):
            logits = self.model(drafted.tokens, cache=self.prompt_cache)[drafted.places]
        sampled = _drawn(Sampler(drafted.draws), logits, drafted.inputs, drafted.mask)
        mx.async_eval(*sampled.pending)
        draws = drafted.by_row(cast(list[int], sampled.tokens.tolist()))
        taken = [self._taken(at, row, draws[at]) for at, row in enumerate(drafted.rows)]
        self._keep(drafted, states, [len(tokens) for tokens, _ in taken])
        return self._responses(taken, drafted.by_row(sampled.logprobs), draws)

    def _taken(self, at: int, row: RowPass, draws: list[int]) -> tuple[list[int], str | None]:
        """Returns the tokens that a row gets, until its end, and why it ends with the last one."""
        tokens = row.inputs[: 1 + row.holds(draws)]
        for count, token in enumerate(tokens, 1):
            self._num_tokens[at] += 1
            is_full = self._num_tokens[at] >= self.max_tokens[at]
            if (is_stop := self._matchers[at].advance(token)) or is_full:
                row.commit(count)
                return tokens[:count], "stop" if is_stop else "length"
        row.commit(len(tokens))
        return tokens, None

    def _keep(self, drafted: DraftPass, states: RecurrentStates, counts: list[int]) -> None:
        """Takes back what did not hold. counts: the tokens that each row gets."""
        rows = list(zip(drafted.rows, drafted.lengths, counts, strict=True))
        kept = [len(row.unfed) + count for row, _, count in rows]
        if states:  # they can't be cut
            kept = [n if n == length else 0 for n, (_, length, _) in zip(kept, rows, strict=True)]
        longest = max(drafted.lengths)
        take_back(self.prompt_cache, [longest - n for n in kept])
        states.finish([n > 0 for n in kept])
        for at, ((row, _, count), n) in enumerate(zip(rows, kept, strict=True)):
            self.tokens[at] += row.fed[:n]
            self.unfed[at] = [] if n else [*row.unfed, *row.inputs[:count]]

    def _responses(
        self,
        taken: list[tuple[list[int], str | None]],
        logprobs: list[list[RowLogprobs | None]],
        draws: list[list[int]],
    ) -> list[Any]:
        responses, keep = [], []
        for at, (tokens, finish) in enumerate(taken):
            entries = [self._next_logprobs[at], *logprobs[at]]
            for n, token in enumerate(tokens):
                entry, ends = entries[n], finish if n + 1 == len(tokens) else None
                cache = self.extract_cache(at) if ends else None
                read = entry() if entry else None
                all_tokens = self.tokens[at] if ends else None
                responses.append(self.Response(self.uids[at], token, read, ends, cache, all_tokens))
            if finish is None:
                keep.append(at)
        lasts = [len(tokens) - 1 for tokens, _ in taken]
        nexts = [row[last] for row, last in zip(draws, lasts, strict=True)]
        self._next_tokens = mx.array(nexts, mx.uint32)
        self._next_logprobs = [row[last] for row, last in zip(logprobs, lasts, strict=True)]
        if len(keep) < len(self):
            self.filter(keep)
        return responses

    def _step(self) -> tuple[list[int], list[Logprobs | None]]:
        inputs, logprobs = self._next_tokens, self._next_logprobs

        sampler, rows = self._for_rows()
        logits, self._logits = self._logits, None
        if logits is None:
            with using(rows, self.model), _seeing(self):
                logits = self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :]
        self.vocabulary, self.is_read = logits.shape[-1], False
        faults = [row.fault for row in self.samplers]
        sampled = self._sampled(sampler, logits, inputs)
        self._next_tokens, self._next_logprobs = sampled.tokens, sampled.logprobs
        mx.async_eval(*sampled.pending)

        # Reading the previous step's tokens overlaps with computing this one's.
        ids = cast(list[int], inputs.tolist())
        for tokens, token in zip(self.tokens, ids, strict=True):
            tokens.append(token)
        for row, fault in zip(self.samplers, faults, strict=True):
            row.error = fault()
        return ids, [entry() if entry else None for entry in logprobs]

    def _sampled(self, sampler: Sampler, logits: mx.array, inputs: mx.array) -> Sampled:
        mask, noise = None, None
        if sampler.constrained:
            with suppress(Exception):  # it is raised again below, where its row fails alone
                noise = sampler.noise(logits.shape[-1])
            mx.async_eval(logits, *(() if noise is None else (noise,)))
            mask = sampler.mask(inputs, logits.shape[-1])  # made while those are computed
        if late := sampler.late:
            return _sampled_but(late, self.samplers, logits, inputs, mask)
        return _drawn(sampler, logits, inputs, mask, noise)

    def draw_late(self) -> None:
        """Draws the next token of this one row, whose mask is made by now."""
        (row,) = self.samplers
        late, row.late = row.late, None
        assert late
        bitmask = late.mask.bitmask if late.mask.restricts else None
        mask = AdditiveMask.of([bitmask], late.logits.shape[-1])
        sampled = _drawn(Sampler([row]), late.logits, late.inputs, mask)
        self._next_tokens, self._next_logprobs = sampled.tokens, sampled.logprobs
        self.is_read = False
        mx.async_eval(*sampled.pending)

    def taken(self, *parts: list[int]) -> list["DecodeBatch"]:
        """Removes some rows and returns each part of them as a batch, with their caches."""
        batches = [self._copied(places) for places in parts]
        gone = set(chain.from_iterable(parts))
        self.filter([i for i in range(len(self)) if i not in gone])
        return batches

    def _copied(self, places: list[int]) -> "DecodeBatch":
        part = self._rows(places)
        caches = [self.extract_cache(at) for at in places]
        part.prompt_cache = PrefillBatch(self.model, part.uids, caches).prompt_cache
        # Unevaluated slices would keep the caches of the whole batch in memory.
        mx.eval([cache.state for cache in part.prompt_cache])
        return part

    def part_without_cache(self, at: int) -> "DecodeBatch":
        one = self._rows([at])
        self.filter([i for i in range(len(self)) if i != at])
        return one

    def _rows(self, places: list[int]) -> "DecodeBatch":
        part: DecodeBatch = DecodeBatch.empty(self.model, self.fallback_sampler)
        for name in PER_ROW:
            values = getattr(self, name)
            setattr(part, name, [values[at] for at in places])
        part._next_tokens = self._next_tokens[mx.array(places)]
        part.vocabulary, part.is_read = self.vocabulary, self.is_read
        return part

    def _for_rows(self) -> tuple[Sampler, RowAdapters]:
        """Returns the rows' sampler and adapters, made again only when the rows have changed."""
        if self._made is None or self._made[0].rows != self.samplers:
            self._made = Sampler(self.samplers), _rows(self.samplers)
        return self._made


def _drawn(
    sampler: Sampler,
    logits: mx.array,
    inputs: mx.array,
    mask: Mask | None,
    noise: mx.array | None = None,
) -> Sampled:
    try:
        return sampler(logits, inputs, mask, noise)
    except Exception as error:
        if device_error(error):  # no row caused it
            raise
        return sample_rows_alone(sampler.rows, logits, inputs, mask)


def _sampled_but(
    late: dict[int, SlowMask],
    rows: list[Row],
    logits: mx.array,
    inputs: mx.array,
    mask: Mask | None,
) -> Sampled:
    """Draws for all rows but the late ones, which keep what their draws need."""
    for at, slow in late.items():
        rows[at].late = LateDraw(logits[at : at + 1], inputs[at : at + 1], slow)
    places = [at for at in range(len(rows)) if at not in late]
    tokens, pending = mx.zeros(len(rows), mx.uint32), [logits, inputs]
    logprobs = dict[int, RowLogprobs | None]()
    if places:
        others = mx.array(places)
        their_mask = None if mask is None else mask[places]
        sampler = Sampler([rows[place] for place in places])
        drawn = _drawn(sampler, logits[others], inputs[others], their_mask)
        tokens[others] = drawn.tokens.astype(mx.uint32)
        logprobs = dict(zip(places, drawn.logprobs, strict=True))
        pending += drawn.pending
    return Sampled(tokens, [logprobs.get(place) for place in range(len(rows))], pending)


class PrefillBatch(PromptProcessingBatch):
    uids: list[int]
    tokens: list[list[int]]
    samplers: list[Row]
    prompt_cache: list[Any]
    logits_processors: list[Any]
    logits: mx.array | None = None
    """What follows the prompts, [rows, vocabulary], once their last tokens are computed too."""

    def prompt(self, tokens: list[list[int]]) -> None:
        """Computes the next tokens of each row's prompt."""
        if {*map(len, tokens)} == {0, 1}:
            # a rotating cache takes one token for a decoding step, in which no row is padded
            self._compute(tokens, 2)
            mx.eval([cache.state for cache in self.prompt_cache])
        else:
            with using(_rows(self.samplers), self.model), _seeing(self):
                super().prompt(tokens)

    def prompt_and_last(self, tokens: list[int]) -> None:
        """Computes the rest of the one row's prompt, whose tokens see the last one. That one's keys
        and values are taken back: decoding begins with it."""
        self.prefill_step_size = len(tokens)
        self.prompt([tokens])
        self.tokens[0].pop()
        for cache in self.prompt_cache:
            cache.trim(1)

    def end(self, tokens: list[list[int]], heads: Collection[int]) -> None:
        """Computes the rest of each row's prompt together with its last token. The caches can all
        be cut, and so need no state before that token."""
        self.logits = self._compute(tokens, max(map(len, tokens)), heads)[:, -1, :]
        mx.eval(self.logits, [cache.state for cache in self.prompt_cache])

    def _compute(
        self, tokens: list[list[int]], width: int, heads: Collection[int] = ()
    ) -> mx.array:
        """width: that to which the rows are padded."""
        lengths = [len(row) for row in tokens]
        padding = [width - length for length in lengths]
        if is_padded := any(padding):
            for cache in self.prompt_cache:
                cache.prepare(lengths=lengths, right_padding=padding)
        inputs = mx.array([[*row, *[0] * pad] for row, pad in zip(tokens, padding, strict=True)])
        adapters = using(_rows(self.samplers), self.model)
        with adapters, _seeing(self), at_ends(heads, lengths):
            logits: mx.array = self.model(inputs, cache=self.prompt_cache)
        for known, row in zip(self.tokens, tokens, strict=True):
            known += row
        if is_padded:
            for cache in self.prompt_cache:
                cache.finalize()
        return logits

    def filter(self, keep: list[int]) -> None:
        if self.logits is not None:
            self.logits = self.logits[mx.array(keep)] if keep else None
        super().filter(keep)

    def renew_states(self) -> None:
        """Gives the one row its windows and recurrent states as the prompt cache would. Else
        their arrays, and what masks padding, would depend on how many pieces came since."""
        caches = self.extract_cache(0)
        renewed = PrefillBatch(self.model, self.uids, [caches]).prompt_cache
        for at, cache in enumerate(caches):
            if not can_always_be_cut(cache):
                self.prompt_cache[at] = renewed[at]

    def decode(self, last_tokens: list[int]) -> DecodeBatch:
        """Returns the same rows as a decoding batch; all but their last tokens are computed, and
        these too if there are logits."""
        if self.logits is not None:
            for known in self.tokens:
                known.pop()
        return DecodeBatch(
            self.model,
            self.uids,
            mx.array(last_tokens),
            self.prompt_cache,
            self.tokens,
            self.samplers,
            self.fallback_sampler,
            self.logits_processors,
            self.stop_sequences,
            self.max_tokens,
            logits=self.logits,
        )


def _rows(rows: list[Row]) -> RowAdapters:
    return RowAdapters([row.row_adapter for row in rows])


def _seeing(batch: DecodeBatch | PrefillBatch) -> AbstractContextManager[None]:
    return seeing(batch.model, [row.pictures for row in batch.samplers], batch.tokens)


def cheapest_groups(
    lengths: Sequence[int], cost: Callable[[int, int], float]
) -> tuple[float, list[list[int]]]:
    """Returns what the groups of rows cost for which that is the least, and their rows by index.

    lengths: of each row. cost: of a group, by its rows and the length of the longest. The rows of a
    group have neighbouring lengths: any others would be padded more.
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    best: list[tuple[float, list[list[int]]]] = [(0.0, [])]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        begin = min(range(end), key=lambda begin: best[begin][0] + cost(end - begin, longest))
        before, groups = best[begin]
        best.append((before + cost(end - begin, longest), [*groups, order[begin:end]]))
    return best[-1]


def padding(lengths: Sequence[int]) -> int:
    """Returns the tokens by which a group of rows of such lengths is padded."""
    return len(lengths) * max(lengths, default=0) - sum(lengths)


def padded_less(
    groups: list[list[int]], lengths: Sequence[int], most: int | None
) -> list[list[int]]:
    """Returns the groups, split until they are padded by `most` tokens together.

    groups: rows by index, each with neighbouring lengths in ascending order.
    """

    def padded(group: list[int]) -> int:
        return padding([lengths[row] for row in group])

    groups = list(groups)
    while most is not None and sum(map(padded, groups)) > most:
        worst = max(groups, key=padded)
        halves = [(worst[:at], worst[at:]) for at in range(1, len(worst))]
        groups.remove(worst)
        groups += min(halves, key=lambda both: sum(map(padded, both)))
    return groups


DRAFT_SECONDS = 0.01
"""The time of a pass after which further rows are not asked for drafts: some read all of
a long prompt first."""

MOST_UNFED = 16
"""With more tokens to feed again a row drafts none: a second draft that fails adds to them."""

WORTH = 0.25
"""Groups change if a step then costs less by this share of one row's: a change copies rows."""


RIDING = 1.04
"""Rows of lower tiers join those of a higher one if a step then takes at most so many times as
long."""


class DecodeGroups:
    def __init__(
        self,
        costs: StepCosts,
        most_padding: int | None = None,
        gate: Gate | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """most_padding: the tokens by which the groups may be padded together. gate: says how many
        tokens of drafts pay; None: no row drafts."""
        self._costs, self._clock = costs, clock
        self._most_padding = most_padding
        self.groups: list[DecodeBatch] = []
        self.gate = gate
        self.positions = 0
        """The tokens that the latest step computed: one for each row, and those of drafts."""

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def __contains__(self, number: int) -> bool:
        return any(number in group.uids for group in self.groups)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.samplers]

    @property
    def tiers(self) -> set[Tier]:
        """The tiers that steps serve: a group has the tier of its highest row."""
        return {_tier(group) for group in self.groups}

    def served(self, tier: Tier) -> list[Row]:
        """Returns the rows that a step of this tier serves."""
        groups = (group.samplers for group in self.groups if _tier(group) is tier)
        return [*chain.from_iterable(groups)]

    def wait(self) -> None:
        """Waits until the device has computed what was launched ahead."""
        mx.eval([group._next_tokens for group in self.groups])

    @property
    def lengths(self) -> list[list[int]]:
        """The number of tokens of each row of each group."""
        return [[len(tokens) for tokens in group.tokens] for group in self.groups]

    def place(self, number: int) -> tuple[DecodeBatch, int]:
        """Returns the group of a row, and the row's place in it."""
        group = next(group for group in self.groups if number in group.uids)
        return group, group.uids.index(number)

    def next(self, tier: Tier) -> Iterator[tuple[Any, bool]]:
        """Yields mlx-lm's responses for the next tokens of each row of a tier's groups, and whether
        the row is alone in its group. Only a row that is alone frees its memory as soon as it
        finishes: any other group has to be copied without it."""
        rows, self.positions = len(self), 0
        for group in [group for group in self.groups if _tier(group) is tier]:
            alone = len(group) == 1
            self.positions += len(group)
            drafts = group.drafts(self.gate, self._costs, self._clock) if self.gate else None
            if drafts is not None:
                self.positions += sum(map(len, drafts)) + sum(map(len, group.unfed))
                responses = group.next_of(drafts, self._costs)
            else:
                padding = 0 if _is_apart(group) else self._costs.curve.padding(len(group))
                with packed([1] * len(group), padding):
                    responses = group.next()
            for response in responses:
                yield response, alone
        if len(self) != rows:
            self._regroup()

    def extend(self, batch: DecodeBatch) -> None:
        self.groups.append(batch)
        self._regroup()

    def parts(self, numbers: Collection[int]) -> list[DecodeBatch]:
        """Removes rows and returns each as a batch, with its cache."""
        parts: list[DecodeBatch] = []
        for group in list(self.groups):
            places = [at for at, number in enumerate(group.uids) if number in numbers]
            if len(places) == len(group) == 1:
                self.groups.remove(group)
                parts.append(group)
            elif places:
                parts += group.taken(*([place] for place in places))
        self._regroup()
        return parts

    def part_without_cache(self, number: int) -> DecodeBatch:
        """Removes one row and returns it as a batch."""
        group, place = self.place(number)
        one = group.part_without_cache(place)
        self._regroup()
        return one

    def _regroup(self) -> None:
        """Regroups the rows after some have come or left, if a step then costs enough less, or if
        the padding exceeds the memory that is reserved for it."""
        apart = [group for group in self.groups if group and _is_apart(group)]
        self.groups = [group for group in self.groups if group and not _is_apart(group)]
        token = max((self._costs.token(group.prompt_cache) for group in self.groups), default=0.0)
        numbers = [number for group in self.groups for number in group.uids]
        now = self.lengths
        now_of = [_tier(group) for group in self.groups for _ in group.samplers]
        lengths = [*chain.from_iterable(now)]

        def cost(rows: int, longest: int) -> float:
            return self._costs.weights(rows) + rows * longest * token

        def cost_of(groups: list[list[int]]) -> float:
            return sum(cost(len(group), max(group)) for group in groups)

        parts, groups = self._by_tier(lengths, cost), list[list[int]]()
        for part in parts.values():
            cheapest = cheapest_groups([lengths[row] for row in part], cost)[1]
            groups += [[part[at] for at in group] for group in cheapest]
        groups = padded_less(groups, lengths, self._most_padding)
        saved = cost_of(now) - cost_of([[lengths[row] for row in rows] for rows in groups])
        most = self._most_padding
        is_padded_too_much = most is not None and sum(map(padding, now)) > most
        is_of_others = any(now_of[row] is not tier for tier, part in parts.items() for row in part)
        if saved > WORTH * self._costs.weights(1) or is_padded_too_much or is_of_others:
            self._change([{numbers[row] for row in rows} for rows in groups])
        self.groups += apart

    def _by_tier(
        self, lengths: list[int], cost: Callable[[int, int], float]
    ) -> dict[Tier, list[int]]:
        """Returns the rows, by index, that each tier's steps serve: its own, and those of lower
        tiers with which the steps take hardly longer. These stay where they are if they can."""
        tiers = [(row.tier, _tier(group)) for group in self.groups for row in group.samplers]
        left = sorted(range(len(tiers)), key=lambda row: (*tiers[row], lengths[row]))
        parts = dict[Tier, list[int]]()
        while left:
            tier, _ = tiers[left[0]]
            part = parts[tier] = [row for row in left if tiers[row][0] is tier]
            most = RIDING * cost(len(part), max(lengths[row] for row in part))
            for row in left[len(part) :]:
                longest = max(lengths[each] for each in (*part, row))
                if self._costs.curve.is_flat or cost(len(part) + 1, longest) > most:
                    break
                part.append(row)
            left = [row for row in left if row not in part]
        return parts

    def _change(self, wanted: list[set[int]]) -> None:
        parts = list(chain.from_iterable(_split(group, wanted) for group in self.groups))
        self.groups = []
        for numbers in wanted:
            some = (part for part in parts if part.uids[0] in numbers)
            largest, *others = sorted(some, key=lambda part: -_padded(part, {*part.uids}))
            for other in others:
                largest.extend(other)
            self.groups.append(largest)


def _tier(group: DecodeBatch) -> Tier:
    return min(row.tier for row in group.samplers)


def _is_apart(group: DecodeBatch) -> bool:
    """Whether it is a deterministic row, which shares no pass."""
    return group.samplers[0].deterministic


def _split(group: DecodeBatch, wanted: list[set[int]]) -> Iterator[DecodeBatch]:
    """Yields the rows of a group that belong together from now on. Those that take the most memory
    stay where they are, the others are copied."""
    while len(parts := [numbers for numbers in wanted if not numbers.isdisjoint(group.uids)]) > 1:
        least = min(parts, key=lambda numbers: _padded(group, numbers))
        yield from group.taken([at for at, number in enumerate(group.uids) if number in least])
    yield group


def _padded(group: DecodeBatch, numbers: set[int]) -> int:
    """Returns the tokens that some rows of a group take, padding included."""
    rows = zip(group.uids, group.tokens, strict=True)
    lengths = [len(tokens) for number, tokens in rows if number in numbers]
    return len(lengths) * max(lengths)
