"""The decoding rows of a model, in groups of similar lengths, each of which is a batch of mlx-lm's.

A batch pads its rows to the longest. MLX's attention reads the padding too: its kernel for long
contexts loads keys and values before it looks at the mask. Rows in another batch have less padding,
and another pass costs what the model's cost curve says. A step of the rows is a step of each group.

mlx-lm's batches, one for prefill and one for decoding, carry the Row objects as their per-row
"samplers", so that rows, and the adapters that they name, are merged and filtered together with the
caches.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain
from typing import Any, cast

import mlx.core as mx

from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import Logprobs
from mlx_server.worker.constrained_decoding.mask_threads import SlowMask
from mlx_server.worker.costs import StepCosts
from mlx_server.worker.lora_layers import RowAdapters, using
from mlx_server.worker.mlx_lm_internals import GenerationBatch, PromptProcessingBatch
from mlx_server.worker.padded_rows import padded
from mlx_server.worker.prefill.memory_tier import can_always_be_cut
from mlx_server.worker.row import LateDraw, Row
from mlx_server.worker.sampling import RowLogprobs, Sampled, Sampler, sample_rows_alone
from mlx_server.worker.sight import seeing

PER_ROW = (
    *("uids", "tokens", "samplers", "logits_processors", "max_tokens", "stop_sequences"),
    *("_next_logprobs", "_token_context", "_num_tokens", "_matchers"),
)
"""The attributes of mlx-lm's batch that are lists with one entry for each row."""


class DecodeBatch(GenerationBatch):
    # The types of mlx-lm's own state that is used here.
    uids: list[int]
    tokens: list[list[int]]
    samplers: list[Row]
    prompt_cache: list[Any]
    _next_tokens: mx.array
    _next_logprobs: list[RowLogprobs | None]

    _made: tuple[Sampler, RowAdapters] | None = None

    def _step(self) -> tuple[list[int], list[Logprobs | None]]:
        inputs, logprobs = self._next_tokens, self._next_logprobs
        self._current_tokens, self._current_logprobs = inputs, logprobs

        sampler, rows = self._for_rows()
        with using(rows, self.model), _seeing(self):
            logits = self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :]
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
        return ids, [entry.read() if entry else None for entry in logprobs]

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
        sampler = Sampler([row])
        mask = sampler.late_mask(late.mask, late.logits.shape[-1])
        sampled = _drawn(sampler, late.logits, late.inputs, mask)
        self._next_tokens, self._next_logprobs = sampled.tokens, sampled.logprobs
        mx.async_eval(*sampled.pending)

    def part(self, places: list[int]) -> "DecodeBatch":
        """Removes some rows and returns them as a batch, with their caches."""
        part = self._copied(places)
        self.filter([i for i in range(len(self)) if i not in places])
        return part

    def parts(self, places: list[int]) -> list["DecodeBatch"]:
        """Removes some rows and returns each as a batch, with its cache."""
        parts = [self._copied([place]) for place in places]
        self.filter([i for i in range(len(self)) if i not in places])
        return parts

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
    mask: mx.array | None,
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
    mask: mx.array | None,
) -> Sampled:
    """Draws for all rows but the late ones, which keep what their draws need."""
    for at, slow in late.items():
        rows[at].late = LateDraw(logits[at : at + 1], inputs[at : at + 1], slow)
    places = [at for at in range(len(rows)) if at not in late]
    tokens, pending = mx.zeros(len(rows), mx.uint32), [logits, inputs]
    logprobs = dict[int, RowLogprobs | None]()
    if places:
        others = mx.array(places)
        own = None if mask is None else mask[others]
        sampler = Sampler([rows[place] for place in places])
        drawn = _drawn(sampler, logits[others], inputs[others], own)
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

    def prompt(self, tokens: list[list[int]]) -> None:
        """Computes the next tokens of each row's prompt."""
        lengths = [len(row) for row in tokens]
        if max(lengths) == 1 and min(lengths) == 0:
            self._prompt_token(tokens, lengths)
        else:
            with using(_rows(self.samplers), self.model), _seeing(self):
                super().prompt(tokens)

    def _prompt_token(self, tokens: list[list[int]], lengths: list[int]) -> None:
        """Computes one token for some rows and none for others. They are padded to two tokens: a
        rotating cache treats an input of one token as a decoding step, where no row is padded."""
        for cache in self.prompt_cache:
            cache.prepare(lengths=lengths, right_padding=[2 - length for length in lengths])
        with using(_rows(self.samplers), self.model), _seeing(self):
            self.model(mx.array([[*row, 0, 0][:2] for row in tokens]), cache=self.prompt_cache)
        for known, row in zip(self.tokens, tokens, strict=True):
            known += row
        for cache in self.prompt_cache:
            cache.finalize()
        mx.eval([cache.state for cache in self.prompt_cache])

    def renew_states(self) -> None:
        """Gives the one row its windows and recurrent states as the prompt cache would. Else
        their arrays, and what masks padding, would depend on how many pieces came since."""
        caches = self.extract_cache(0)
        renewed = PrefillBatch(self.model, self.uids, [caches]).prompt_cache
        for at, cache in enumerate(caches):
            if not can_always_be_cut(cache):
                self.prompt_cache[at] = renewed[at]

    def decode(self, last_tokens: list[int]) -> DecodeBatch:
        """Returns the same rows as a decoding batch; all but their last tokens are computed."""
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


WORTH = 0.25
"""Groups change if a step then costs less by this share of one row's: a change copies rows."""


class DecodeGroups:
    def __init__(self, costs: StepCosts, most_padding: int | None = None) -> None:
        """most_padding: the tokens by which the groups may be padded together."""
        self._costs = costs
        self._most_padding = most_padding
        self._groups: list[DecodeBatch] = []

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __contains__(self, number: int) -> bool:
        return any(number in group.uids for group in self._groups)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self._groups for row in group.samplers]

    @property
    def lengths(self) -> list[list[int]]:
        """The number of tokens of each row of each group."""
        return [[len(tokens) for tokens in group.tokens] for group in self._groups]

    @property
    def caches(self) -> list[Any]:
        return [cache for group in self._groups for cache in group.prompt_cache]

    def place(self, number: int) -> tuple[DecodeBatch, int]:
        """Returns the group of a row, and the row's place in it."""
        group = next(group for group in self._groups if number in group.uids)
        return group, group.uids.index(number)

    def next(self) -> Iterator[tuple[Any, bool]]:
        """Yields mlx-lm's response for the next token of each row, and whether the row is alone in
        its group. Only a row that is alone frees its memory as soon as it finishes: any other group
        has to be copied without it."""
        rows = len(self)
        for group in list(self._groups):
            alone = len(group) == 1
            padding = 0 if _is_apart(group) else self._costs.curve.padding(len(group))
            with padded(padding):
                responses = group.next()
            for response in responses:
                yield response, alone
        if len(self) != rows:
            self._regroup()

    def extend(self, batch: DecodeBatch) -> None:
        self._groups.append(batch)
        self._regroup()

    def remove(self, number: int) -> None:
        group, place = self.place(number)
        group.filter([row for row in range(len(group)) if row != place])
        self._regroup()

    def part(self, number: int) -> DecodeBatch:
        """Removes one row and returns it as a batch, with its cache."""
        (one,) = self.parts({number})
        return one

    def parts(self, numbers: Collection[int]) -> list[DecodeBatch]:
        """Removes rows and returns each as a batch, with its cache."""
        parts: list[DecodeBatch] = []
        for group in list(self._groups):
            places = [at for at, number in enumerate(group.uids) if number in numbers]
            if len(places) == len(group) == 1:
                self._groups.remove(group)
                parts.append(group)
            elif places:
                parts += group.parts(places)
        self._regroup()
        return parts

    def part_without_cache(self, number: int) -> DecodeBatch:
        group, place = self.place(number)
        one = group.part_without_cache(place)
        self._regroup()
        return one

    def _regroup(self) -> None:
        """Regroups the rows after some have come or left, if a step then costs enough less, or if
        the padding exceeds the memory that is reserved for it."""
        apart = [group for group in self._groups if group and _is_apart(group)]
        self._groups = [group for group in self._groups if group and not _is_apart(group)]
        token = max((self._costs.token(group.prompt_cache) for group in self._groups), default=0.0)
        numbers = [number for group in self._groups for number in group.uids]
        now = self.lengths
        lengths = [*chain.from_iterable(now)]

        def cost(rows: int, longest: int) -> float:
            return self._costs.weights(rows) + rows * longest * token

        def cost_of(groups: list[list[int]]) -> float:
            return sum(cost(len(group), max(group)) for group in groups)

        groups = padded_less(cheapest_groups(lengths, cost)[1], lengths, self._most_padding)
        saved = cost_of(now) - cost_of([[lengths[row] for row in rows] for rows in groups])
        most = self._most_padding
        is_padded_too_much = most is not None and sum(map(padding, now)) > most
        if saved > WORTH * self._costs.weights(1) or is_padded_too_much:
            self._change([{numbers[row] for row in rows} for rows in groups])
        self._groups += apart

    def _change(self, wanted: list[set[int]]) -> None:
        parts = list(chain.from_iterable(_split(group, wanted) for group in self._groups))
        self._groups = []
        for numbers in wanted:
            largest, *others = sorted(
                (part for part in parts if part.uids[0] in numbers), key=_padded, reverse=True
            )
            for other in others:
                largest.extend(other)
            self._groups.append(largest)


def _is_apart(group: DecodeBatch) -> bool:
    """Whether it is a deterministic row, which shares no pass."""
    return group.samplers[0].deterministic


def _split(group: DecodeBatch, wanted: list[set[int]]) -> Iterator[DecodeBatch]:
    """Yields the rows of a group that belong together from now on. Those that take the most memory
    stay where they are, the others are copied."""
    while len(parts := [numbers for numbers in wanted if not numbers.isdisjoint(group.uids)]) > 1:
        least = min(parts, key=lambda numbers: _padded_of(group, numbers))
        yield group.part([at for at, number in enumerate(group.uids) if number in least])
    yield group


def _padded(group: DecodeBatch) -> int:
    return _padded_of(group, set(group.uids))


def _padded_of(group: DecodeBatch, numbers: set[int]) -> int:
    """Returns the tokens that some rows of a group take, padding included."""
    rows = zip(group.uids, group.tokens, strict=True)
    lengths = [len(tokens) for number, tokens in rows if number in numbers]
    return len(lengths) * max(lengths)
