"""Decides whose prompt is computed next, and how much of it before the rows that decode go on.

A small piece of prefill reads nearly as many weights as a large one. So a piece takes as long as
streams may wait, and is followed by steps until prefill has had no more than its share of the time.
What pieces and steps of each size take follows the model's cost curve.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import count, product, takewhile
from math import ceil, inf
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlx_server.fair_queue import FairQueue
from mlx_server.worker.costs import FLAT, MOST_TOKENS, CostCurve


@dataclass(frozen=True)
class Schedule:
    """How prompts are computed while other rows decode."""

    prefill_share: float = 0.8
    """The largest share of the time that prefill may take."""
    longest_gap: float = 0.3
    """The intended maximum of seconds between two tokens of a row."""
    most_of_prompt: float = inf
    """A piece takes at most this share of the time of a whole prompt, of MOST tokens, even where
    small pieces compute prompts slowly."""


DEFAULT_SCHEDULE = Schedule()


MEASURED = 24
"""The number of latest pieces to which the cost is fitted."""
FADING = 0.9
"""The weight of a piece relative to the one after it."""
WEIGHTS = FADING ** np.arange(MEASURED - 1, -1, -1)

PRIOR, FLAT_PRIOR = (0.0, 0.1, 0.01), (0.1, 0.0, 0.03)
"""The penalty on each coefficient, which decides where pieces of one size can't separate them: the
curve explains the time; without one the tokens do, as it can only turn out to be shorter then."""

FIRST, FIRST_TIMES = 32, 1.5
"""Tokens of the first piece, whose time is unknown; more if a curve says that it takes at most so
many times as long."""
BEST_SHARE = 0.98
"""A piece is the largest one in which tokens are computed at this share of the best speed."""
GROWTH = 2
"""A piece is at most this many times as large as the largest measured one, and no larger than it
would be if that one's time were proportional to its tokens."""

SUBSETS = np.array([chosen for chosen in product((True, False), repeat=3) if any(chosen)])
"""Which of the three coefficients a fit has; the others are zero."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class PrefillPiece:
    rows: int
    length: int
    """Tokens of each row in this piece."""
    context: int
    """Tokens of each row before this piece."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class PrefillCost:
    """Predicts the time of a piece of prefill on this machine and model from the latest pieces.

    A piece takes what the curve says for its tokens, or a constant time if it is flat; a time for
    each of its tokens; and attention's time for each pair of a token and one before it. The three
    coefficients are fitted to the measured times, none of them below zero.
    """

    def __init__(self, curve: CostCurve = FLAT) -> None:
        self._measured: deque[tuple[PrefillPiece, float]] = deque(maxlen=MEASURED)
        self._causes_per_second: deque[list[float]] = deque(maxlen=MEASURED)
        self._largest = 0, 0.0
        """The tokens of the largest piece so far, and its seconds when it was last computed. Short
        prompts do not make it smaller, so that many at once need not begin with small pieces."""
        self._sizes: set[int] = set()
        """The smallest and the largest number of tokens of a piece so far."""
        self._fit: Vector | None = np.zeros(3)
        """None if something was learnt since."""
        self._curve = curve
        for tokens, seconds in curve.known.items():
            self.learn(PrefillPiece(1, tokens, 0), seconds)

    def learn(self, piece: PrefillPiece, seconds: float) -> None:
        seconds = max(seconds, 1e-9)
        self._measured.append((piece, seconds))
        self._causes_per_second.append([cause / seconds for cause in self._causes(piece)])
        if piece.tokens >= self._largest[0]:
            self._largest = piece.tokens, seconds
        sizes = {*self._sizes, piece.tokens}
        self._sizes = {min(sizes), max(sizes)}
        self._fit = None  # a first token does not wait for the next fit

    def settle(self) -> None:
        """Fits the coefficients, if that is due."""
        if self._fit is None:
            self._fit = self._fitted()

    @property
    def _cost(self) -> Vector:
        """Seconds for the curve's unit, for each token, and for each pair of a token and one before
        it."""
        self.settle()
        assert self._fit is not None
        return self._fit

    def seconds(self, piece: PrefillPiece) -> float:
        """Predicts the seconds of a piece. It takes at least as long, by the curve or by its
        tokens, as the largest of the latest that had not much more context: a fit to the few pieces
        of short prompts may predict less."""
        most = piece.context + piece.length
        alike = [each for each in reversed(self._measured) if each[0].context <= most]
        if not alike:
            return self._predicted(piece)
        largest, took = max(alike, key=lambda measured: measured[0].tokens)
        return max(self._predicted(piece), took * self._longer(piece.tokens, largest.tokens))

    def _causes(self, piece: PrefillPiece) -> tuple[float, float, float]:
        pairs = piece.tokens * (piece.context + piece.length / 2)
        return self._curve.piece(piece.tokens), float(piece.tokens), pairs

    def _predicted(self, piece: PrefillPiece) -> float:
        return float(np.dot(self._cost, self._causes(piece)))

    def _longer(self, tokens: int, others: int) -> float:
        """Returns how much longer a piece takes at least than one of other tokens."""
        if self._curve.is_flat:
            return tokens / others
        return min(tokens / others, self._curve.piece(tokens) / self._curve.piece(others))

    def tokens(self, seconds: float, rows: int, context: int) -> int:
        """Returns the most tokens, of all rows together, that a piece of `seconds` has."""
        if not self._measured:
            return FIRST if self._curve.is_flat else self._scaled(FIRST, 1.0, FIRST_TIMES, MOST)
        allowed = self._tried(seconds)
        sizes = SIZES[: allowed + 1]
        pairs = sizes * (context + sizes / (2 * rows))
        weights = self._weights(allowed)
        fits = (weights + self._cost[2] * pairs) * self._slower <= seconds
        speed = np.where(fits, sizes, 0.0) / np.maximum(weights, 1e-12)
        return _last(fits & (speed >= BEST_SHARE * speed.max()))

    def _tried(self, seconds: float) -> int:
        """Returns a size that is safe to try, from the largest of the latest pieces and that of all
        pieces, whose time may be out of date."""
        piece, took = max(self._measured, key=lambda measured: measured[0].tokens)
        lately = self._scaled(piece.tokens, took, seconds, GROWTH * piece.tokens)
        return max(piece.tokens, lately, self._scaled(*self._largest, seconds, self._largest[0]))

    def _scaled(self, tokens: int, took: float, seconds: float, most: int) -> int:
        """Returns the largest size, up to `most`, for which the time of a piece of `tokens` says
        that it takes no longer than `seconds`."""
        scale = SIZES if self._curve.is_flat else self._curve.pieces
        limit = seconds / took * scale[min(tokens, MOST_TOKENS)]
        return _last(scale[: most + 1] <= limit)

    @property
    def useful(self) -> int:
        """The least size, up to MOST_USEFUL, at which half as many tokens are computed in a second
        as in the largest piece."""
        sizes, largest = SIZES[: MOST_USEFUL + 1], self._weights(MOST)[MOST]
        enough = sizes * largest >= MOST / 2 * self._weights(MOST_USEFUL)
        return int(np.argmax(enough)) if enough.any() else MOST_USEFUL

    def _weights(self, most: int) -> Vector:
        """Returns the seconds, without those of attention, of pieces of up to so many tokens."""
        pieces = self._curve.pieces[: most + 1]
        return np.asarray(self._cost[0] * pieces + self._cost[1] * SIZES[: most + 1])

    @property
    def knows_one_size(self) -> bool:
        """Whether all pieces so far, which are several, had the same size, and no curve says what
        others cost."""
        return self._curve.is_flat and len(self._measured) > 2 and len(self._sizes) == 1

    @property
    def _slower(self) -> float:
        """The factor by which the last piece took longer than predicted, at least 1: the budget
        reacts at once to a machine that slows down."""
        piece, seconds = self._measured[-1]
        return max(1.0, seconds / max(self._predicted(piece), 1e-12))

    def _fitted(self) -> Vector:
        """Fits the coefficients by least squares of the relative errors: the best non-negative fit
        among all subsets of the coefficients."""
        weights = WEIGHTS[-len(self._measured) :]
        causes = np.array(self._causes_per_second)
        largest = causes.max(axis=0)
        known = causes / largest * weights[:, None]
        prior = FLAT_PRIOR if self._curve.is_flat else PRIOR
        normal, right = known.T @ known + np.diag(prior) ** 2, known.T @ weights
        systems = np.where(SUBSETS[:, :, None] & SUBSETS[:, None, :], normal, np.eye(3))
        fits = np.linalg.solve(systems, np.where(SUBSETS, right, 0.0)[:, :, None])[:, :, 0]
        errors = np.sum((fits @ normal - 2 * right) * fits, axis=1)
        best = fits[np.argmin(np.where(fits.min(axis=1) >= 0, errors, inf))]
        fitted: Vector = best / largest
        return fitted


SIZES: Vector = np.arange(MOST_TOKENS + 1, dtype=float)


def _last(fits: NDArray[np.bool_]) -> int:
    """Returns the place of the last true value; 0 if there is none."""
    places = np.flatnonzero(fits)
    return int(places[-1]) if len(places) else 0


IDLE_SECONDS = 0.5
"""Seconds of a piece while no row decodes: short enough to notice a cancel or a new prompt soon."""

LAST_PIECE = 1.15
"""The last piece of a prompt may take longer than the others by this factor, since a short
additional piece wastes time."""

LONGEST = 4 / 3
"""The times that rows wait for longer than the gap before they get a token and others join them."""

STRETCH, WORTH_STRETCHING = 1.25, 1.02
"""A piece may take so many times as long as it should if prompts are then computed so many times as
fast."""

LEAST, MOST = 32, 2048
"""Bounds on the tokens of a piece; mlx-lm would cut longer ones."""
DEEP_LEAST, DEEP_SHARE = 16, 0.7
"""The least piece after more than MOST tokens, where attention makes LEAST tokens take too long, if
it takes at most this share of their time."""
MOST_USEFUL = 512
"""The least piece may be raised to this many tokens where a piece has a large constant cost."""

FIRST_WEIGHT, WORTH_SHARING, ANSWER = 3, 0.95, 32
"""Prompts that don't fit into a piece share several if the sum of the mean time to a first token,
so many times, and of the time until all answers of so many tokens end is less by this factor."""

CROWD, CROWD_SHARE = 8, 0.6
"""Without a curve that shows what a pass of all would save, this share of so many prompts is
computed first if one piece has them: their first tokens come sooner, and the others' hardly later.
Of two groups the mean is least with half of the prompts in the first one, and a few more since each
piece has a constant cost."""

LONG = 256
"""Tokens of a prompt from which its time is known without a curve, so that it says how many are
computed together; shorter ones take what a piece takes at least."""

SAVED_SECONDS = 1.0
"""The most seconds of owed steps that are postponed while several prompts wait."""

MARGIN = 1.07
"""The factor on owed steps, for what the time of the last piece exceeds its prediction."""

DEAREST = 1000.0
"""The most seconds of steps for one second of prefill, where the prefill share is tiny."""

GATHERING = 0.25
"""The share of the gap for which rows may wait while prompts whose first tokens need no step are
computed one after the other."""

STEP_EVERY = 16
"""The number of rounds with a single step after which one has two: the second one shows how long a
step takes by itself."""


class PrefillBudget:
    """Alternates rounds of one piece of prefill and at least one step.

    MLX computes in the background, and the operation after a step waits for the step's end. So the
    first step after a piece seems to take no time, and the next piece that much more.
    """

    def __init__(self, schedule: Schedule, curve: CostCurve = FLAT) -> None:
        self.depth = 0
        """The model's layers, if the last piece of a prompt may compute its last token too."""
        self.schedule = schedule
        self._share, self._gap = schedule.prefill_share, schedule.longest_gap
        self.cost = PrefillCost(curve)
        self._curve = curve
        self._steps: dict[int, float] = {}
        """Seconds of a step by its number of rows, smoothed."""
        self._owed = 0.0
        """Seconds of steps that are due before the next piece."""
        self._stepped = 0
        """Steps since the last piece."""
        self._pending = 0.0
        """Seconds of the latest step that the next piece will wait for."""
        self._advance = 0.0
        """Seconds of steps that come before a prompt's last piece and count for it, and for the
        pass that computes the first token of its answer: steps after these would come after the
        prompt. If several prompts wait, no steps come before: they follow the last prompt, in a
        fuller batch."""
        self._waits = False
        """Whether a prompt has waited since the last step."""
        self._in_company = False
        """Whether another prompt has waited with the present one, at any step since the last one
        without a prompt."""
        self._paying = False
        """Whether steps run until none are owed."""
        self._waited = 0.0
        """Seconds of prefill since the last step."""
        self._joined = False
        """Whether a new row has joined since the last step."""
        self._single = 0
        """Consecutive rounds that had a single step."""

    def use(self, curve: CostCurve) -> None:
        """Predicts by another curve from now on."""
        self.cost, self._curve = PrefillCost(curve), curve

    def of_others(self, most_of_prompt: float) -> "PrefillBudget":
        """Returns a budget for other rows of the same model, which knows what this one does."""
        schedule = replace(self.schedule, most_of_prompt=most_of_prompt)
        other = PrefillBudget(schedule, self._curve)
        other.cost, other._steps = self.cost, self._steps
        other.depth = self.depth
        return other

    def interrupted(self) -> None:
        """Notes that other rows are served: the next step seems to take no time."""
        self._stepped, self._pending = 0, 0.0

    @property
    def is_steady(self) -> bool:
        """Whether the latest step came after another one, so that it took its own time."""
        return self._stepped > 1

    def piece(
        self,
        decoding: int,
        waiting: int,
        rows: int,
        context: int,
        *,
        left: float = inf,
        shared: bool = False,
        overdue: bool = False,
        gathers: bool = False,
    ) -> int:
        """Returns the tokens to compute now, of all rows of the next piece together; 0 if a step
        comes first.

        decoding: the number of decoding rows. shared: whether another model's rows decode.
        overdue: whether the rows have waited for a piece of any model since they had a token.
        gathers: whether first tokens are sent without a step, so that the next prompt may come
        before one.
        waiting: the number of rows without a token. rows, context: those of the next piece.
        left: the tokens of these rows that are still to be computed.
        """
        seconds = min(self._gap, IDLE_SECONDS) if shared else IDLE_SECONDS
        self._in_company = self._in_company or waiting > rows
        self._advance = 0.0
        self._waits = True
        if not decoding:
            return self._tokens(seconds, rows, context)
        step = self._step(decoding)
        steps_due = 2 if not self._steps or self._single >= STEP_EVERY else 1
        due = overdue or self._joined or self._stepped < steps_due
        may_wait = self._in_company and self._steps and self._waited < GATHERING * self._gap
        if (due and not (gathers and may_wait)) or self._owes_steps(waiting, step):
            return 0
        # What one step and earlier prompts leave of the gap, or more if one step exceeds the share
        # of the steps.
        even = step / self._step_debt(1.0)
        seconds = min(self._gap, max(self._gap - step, even)) - self._waited
        tokens = self._stretched(seconds, step, rows, context)
        if 0 < left - tokens < tokens:
            longest = self._longer_gap(LAST_PIECE, self._bounded(seconds), step)
            tokens = self._before_the_end(tokens, int(left), longest, rows, context)
        if left <= tokens and not self._in_company:
            last = PrefillPiece(rows, ceil(left / rows), context)
            own = 0.0 if self.ends(last) else self._step(rows)
            self._advance = self._step_debt(self.cost.seconds(last) + own)
            if self._owed + self._advance > 0:
                return 0
        return tokens

    def _before_the_end(
        self, tokens: int, left: int, longest: float, rows: int, context: int
    ) -> int:
        """Returns the tokens of the last piece but one, or all that are left. longest: the seconds
        that these may take. A small rest may take longer than they do, or than half of them."""

        def took(tokens: int) -> float:
            return self._seconds(tokens, rows, context)

        half, rest = ceil(left / 2), left - tokens
        if took(left) <= longest:
            return left
        if 2 * took(half) < took(tokens) + took(rest):
            return half
        return left if took(left) <= took(rest) else tokens

    def _stretched(self, seconds: float, step: float, rows: int, context: int) -> int:
        """Returns the tokens of a piece of `seconds`, or of a longer one that is worth it, as where
        any piece reads all of many experts, or another tile nearly fits and steps take long."""
        tokens = self._tokens(seconds, rows, context)
        if self._curve.is_flat or self.schedule.most_of_prompt < inf:
            return tokens

        def speed(tokens: int) -> float:
            took = self._seconds(tokens, rows, context)
            return tokens / (took + max(step, self._step_debt(took)))

        more = self._tokens(self._longer_gap(STRETCH, seconds, step), rows, context)
        return more if speed(more) >= WORTH_STRETCHING * speed(tokens) else tokens

    def _longer_gap(self, times: float, seconds: float, step: float) -> float:
        """Returns so many times the seconds of a piece, or what a step leaves of the longest gap
        where that is enough for a piece."""
        room = LONGEST * self._gap - step
        return min(times * seconds, room) if room >= seconds else times * seconds

    def together(self, decoding: int, left: Sequence[int], piece: int) -> int | None:
        """Returns how many waiting prompts to compute in the same pieces; None: as many as fit into
        one. Fewer pay where they are computed no faster together, so that some have their first
        tokens sooner. More pay where steps of a few rows take much of the time, and those of more
        rows hardly longer.

        left: the tokens of each prompt, in the order in which they are computed. piece: the tokens
        of the first piece."""
        if self._curve.is_flat and max(left) < LONG:
            first = ceil(CROWD_SHARE * len(left))
            return first if len(left) >= CROWD and first * max(left[:first]) <= piece else None
        if not self._steps or len(left) < 2:
            return None
        tokens = self._stretched(self._gap, self._step(decoding) if decoding else 0.0, 1, 0)
        # an answer ends before the next of long prompts is computed
        if max(left) > ANSWER * tokens:
            return None
        fitting = min(max(1, tokens // max(left)), len(left))
        fewer = takewhile(lambda rows: rows, (fitting >> n for n in count(1)))
        more = takewhile(lambda rows: rows < len(left), (fitting << n for n in count(1)))
        steps = [0.0, *map(self._step, range(1, decoding + len(left) + 1))]

        def waited(rows: int) -> float:
            first, done = self._times(decoding, left, rows, tokens, steps)
            return FIRST_WEIGHT * first + done

        best = min((*fewer, *more, len(left)), key=waited)
        return best if waited(best) <= WORTH_SHARING * waited(fitting) else None

    def _times(
        self, decoding: int, left: Sequence[int], rows: int, tokens: int, steps: Sequence[float]
    ) -> tuple[float, float]:
        """Returns the mean seconds to a first token and those until all rows have ended, if so many
        prompts share each piece of `tokens`. steps: the seconds of a step by its rows."""
        now = firsts = owed = 0.0
        stepped = 0
        begun = list[tuple[int, int]]()
        """Rows that decode, and the number of the step with which they end."""

        def of_rows(stepped: int) -> float:
            return steps[decoding + sum(rows for rows, end in begun if end > stepped)]

        for begin in range(0, len(left), rows):
            group = left[begin : begin + rows]
            size, longest = max(1, tokens // len(group)), max(group)
            sizes = [size] * (longest // size) + [longest % size] * (longest % size > 0)
            seconds = {n: self._seconds(n * len(group), len(group), 0) for n in {*sizes}}
            for piece in sizes:
                took, step = seconds[piece], of_rows(stepped)
                owed += self._step_debt(took) if step else 0.0
                count = ceil(owed / step) if step and owed > SAVED_SECONDS else 1
                owed = max(0.0, owed - count * step)
                now, stepped = now + took + count * step, stepped + count
            now += steps[len(group)]  # of their own, or the one that sends their tokens
            firsts += len(group) * now
            begun.append((len(group), stepped + ANSWER))
        for _, end in begun:
            now, stepped = now + max(0, end - stepped) * of_rows(stepped), max(end, stepped)
        return firsts / len(left), now

    def _tokens(self, seconds: float, rows: int, context: int) -> int:
        # Pieces of one size do not show what further tokens cost, which may be very little.
        least = LEAST + (LEAST // 2 if self.cost.knows_one_size else 0)
        if context > MOST and self._seconds(LEAST, rows, context) > seconds:
            half = self._seconds(DEEP_LEAST, rows, context)
            least = DEEP_LEAST if half < DEEP_SHARE * self._seconds(LEAST, rows, context) else least
        if self.schedule.most_of_prompt == inf:
            least = max(least, self.cost.useful)
        return max(least, min(MOST, self.cost.tokens(self._bounded(seconds), rows, context)))

    def _bounded(self, seconds: float) -> float:
        """Returns the seconds of a piece, or the most that a piece of these rows may take."""
        most = self.schedule.most_of_prompt
        return seconds if most == inf else min(seconds, most * self._seconds(MOST, 1, 0))

    def _seconds(self, tokens: int, rows: int, context: int) -> float:
        return self.cost.seconds(PrefillPiece(rows, ceil(tokens / rows), context))

    def ends(self, piece: PrefillPiece) -> bool:
        """Whether the last piece of prompts, with their last tokens, takes less than a piece
        without them and a pass of their own: it computes all of the last layer, of which keys and
        values are enough before them."""
        return self.depth > 0 and self.cost.seconds(piece) < self.depth * self._step(piece.rows)

    def is_step_first(self, context: int, rows: int, decoding: int, *, own: bool) -> bool:
        """Whether decoding rows get a token before new rows with so many tokens join them. own:
        whether these have a pass of their own before the next step.

        They have just waited for a piece, and the first steps with a long cache take longer than
        the others. A short one joins at once, unless steps take long."""
        joining = own * self._step(rows) + self._step(decoding + rows)
        is_long = context > MOST or self._waited + joining > LONGEST * self._gap
        return is_long and self._waited > self._gap / 2

    def joined(self, rows: int, *, own: bool, sent: bool = False) -> None:
        """Notes that so many new rows decode. own: whether they had a pass of their own. sent:
        whether their first tokens are sent; else a step sends them before the next piece."""
        self._joined = not sent
        if own and (sent or self._advance):
            self._owed += self._step_debt(self._step(rows))
        if own and sent:
            self._waited += self._step(rows)

    def _owes_steps(self, waiting: int, step: float) -> bool:
        """Whether steps are due. While several prompts wait, steps are postponed for a while: they
        serve more rows later and take no longer."""
        if waiting > 1 and not self._paying:
            self._paying = self._owed > SAVED_SECONDS
        else:
            self._paying = self._owed > step / 2
        return self._paying

    def stepped(self, decoding: int, seconds: float) -> None:
        self.cost.settle()
        if self._stepped:
            known = self._steps.get(decoding, seconds)
            self._steps[decoding] = 0.7 * known + 0.3 * seconds
        else:
            self._pending = max(0.0, self._step(decoding) - seconds)
        self._stepped += 1
        self._waited, self._joined = 0.0, False
        self._in_company, self._waits = self._in_company and self._waits, False
        step = self._step(decoding)
        # A step more than `_advance`, which grows with the measured time of a step.
        self._owed = max(self._owed - step, -(step + self._advance))

    def prefilled(self, piece: PrefillPiece | None, decoding: int, seconds: float) -> None:
        """piece: None for a part of a vision tower."""
        took = max(seconds - self._pending, seconds / 4) if decoding else seconds
        if piece:
            self.cost.learn(piece, took)
        self._waited += took
        self._single = self._single + 1 if self._stepped == 1 else 0
        self._stepped, self._pending = 0, 0.0
        self._owed = self._owed + self._step_debt(took) if decoding else 0.0

    def _step_debt(self, seconds: float) -> float:
        """Returns the seconds of steps that are owed for a piece of `seconds`."""
        return min(DEAREST, (1 - self._share) / self._share) * MARGIN * seconds

    def _step(self, decoding: int) -> float:
        """Returns the seconds of a step of `decoding` rows: those measured of the nearest number,
        times what the curve says of the two."""
        if not self._steps:
            return 0.0
        nearest = min(self._steps, key=lambda rows: abs(rows - decoding))
        return self._steps[nearest] * self._curve.step(decoding) / self._curve.step(nearest)


TURN = 1024
"""Prompt tokens after which a client's turn is counted although its prompt continues."""

PASSED_OVER = 8192
"""Tokens of a client's later prompts that are computed before its oldest one has a turn."""

PASSED_OVER_SHARE = 4
"""The number of these tokens that one token of the oldest prompt cancels."""

SMALL = 2
"""A prompt with at most this many pieces left is finished before another client's turn."""


class ScheduledPrompt(Protocol):
    """A prompt that waits or is being computed."""

    @property
    def client(self) -> str: ...
    @property
    def number(self) -> int:
        """Numbers increase in order of arrival."""

    @property
    def left(self) -> int:
        """The number of tokens that are still to be computed."""

    @property
    def rows(self) -> Sized:
        """The rows that are computed together."""


P = TypeVar("P", bound=ScheduledPrompt)


class PromptScheduler(Generic[P]):
    """Decides whose prompt is next: clients take turns, shortest prompt first within a client.

    Clients are served as in VTC ("Fairness in Serving Large Language Models", Sheng et al. 2024):
    the client with the fewest computed prompt tokens is next (its time in a `FairQueue`), and a new
    client starts level with the lowest active one. So a new client gets its turn at once from a
    client with many prompts, and its prompt is then computed to its end. Within a client, the
    prompt with the fewest tokens left goes first; after PASSED_OVER tokens of later prompts, the
    client's oldest prompt has a turn.
    """

    def __init__(self) -> None:
        self._waiting: list[P] = []
        """The waiting prompts, in order of arrival."""
        self._served = FairQueue()
        """By the tokens computed for each client, without those of the present turn that are
        uncounted."""
        self._passed_over: dict[str, int] = {}
        """Tokens computed of each client's later prompts while its oldest one waits."""
        self._since: dict[str, int] = {}
        """The time at which each client arrived or had its latest turn: among equals, the earliest
        is next."""
        self._times = count()
        self._client: str | None = None
        """The client whose turn it is."""
        self._turn = 0
        """Tokens computed in this turn that are not counted in `_served` yet."""
        self._piece = 0
        """Tokens of the latest piece of this turn; 0 before the first piece."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[P]:
        return iter(self._waiting)

    def add(self, prompt: P) -> None:
        """Adds a new prompt, or one that another prompt has replaced."""
        active = {waiting.client for waiting in self._waiting}
        active |= set() if self._client is None else {self._client}
        if prompt.client not in active:
            self._enter(prompt.client, active)
        self._waiting.append(prompt)
        self._waiting.sort(key=lambda waiting: waiting.number)

    def _enter(self, client: str, active: set[str]) -> None:
        if active:
            self._served.advance(min(self._served.time(name) for name in active))
        else:
            self._served = FairQueue()
        self._since = {name: self._since[name] for name in active}
        self._since[client] = next(self._times)
        self._passed_over = {n: t for n, t in self._passed_over.items() if n in active}

    def remove(self, prompt: P) -> None:
        self._waiting.remove(prompt)

    def begin(self, prompt: P) -> None:
        """Takes a prompt out of the queue and starts its client's turn."""
        self.end()
        self._waiting.remove(prompt)
        self._client = prompt.client

    def end(self) -> None:
        """Ends the turn, because its prompt is computed, was cancelled or is replaced."""
        self._count()
        if self._client is not None:
            self._since[self._client] = next(self._times)
        self._client = None
        self._piece = 0

    def computed(self, prompt: P, client: str, tokens: int) -> None:
        """Counts computed tokens. client: the prompt's own, or that of a row in the same pieces."""
        if client != self._client:  # the row shares the pieces of another client's prompt
            self._served.charge(client, tokens)
            return
        self._turn += tokens
        self._piece = tokens
        if self._turn >= TURN:
            self._count()
        passed_over = self._passed_over.get(client, 0)
        if any(waiting.number < prompt.number for waiting in self._client_prompts(client)):
            passed_over += tokens
        else:
            passed_over = max(0, passed_over - PASSED_OVER_SHARE * tokens)
        self._passed_over[client] = passed_over

    def _count(self) -> None:
        if self._client is not None:
            self._served.charge(self._client, self._turn)
        self._turn = 0

    def next(self, may_begin: Callable[[P], bool]) -> P | None:
        """Returns the next waiting prompt for which `may_begin` is true."""
        return next(filter(may_begin, self._firsts()), None)

    def instead_of(self, prompt: P, may_begin: Callable[[P], bool]) -> P | None:
        """Returns a waiting prompt that should replace the one being computed, if any."""
        if not self._piece:  # each turn computes at least one piece, however many prompts arrive
            return None
        return next((p for p in self._before(prompt) if may_begin(p)), None)

    def _before(self, prompt: P) -> Iterator[P]:
        for first in self._firsts():
            before = self._is_shorter if first.client == prompt.client else self._has_had_less
            if before(first, prompt):
                yield first

    def _is_shorter(self, first: P, prompt: P) -> bool:
        """Whether `first` goes before another prompt of the same client, being much shorter."""
        is_passed_over = self._passed_over.get(prompt.client, 0) and prompt.number < first.number
        is_shorter = first.left / len(first.rows) < prompt.left / len(prompt.rows) / 2
        return not is_passed_over and is_shorter

    def _has_had_less(self, first: P, prompt: P) -> bool:
        """Whether the client of `first` has had fewer tokens and has fewer left to compute."""
        return (
            self._served.time(first.client) <= self._served.time(prompt.client)
            and (prompt.left > SMALL * self._piece or first.left < prompt.left)
            and self._backlog(first.client) < self._backlog(prompt.client) + prompt.left
        )

    def _firsts(self) -> Iterator[P]:
        """Yields the first prompt of each client, in the order in which clients are served."""
        clients: dict[str, list[P]] = {}
        for prompt in self._waiting:
            clients.setdefault(prompt.client, []).append(prompt)
        for client in sorted(
            clients, key=lambda each: (self._served.time(each), self._since[each])
        ):
            yield self._first(client, clients[client])

    def _client_prompts(self, client: str) -> list[P]:
        return [prompt for prompt in self._waiting if prompt.client == client]

    def _backlog(self, client: str) -> int:
        return sum(prompt.left for prompt in self._client_prompts(client))

    def _first(self, client: str, prompts: list[P]) -> P:
        if self._passed_over.get(client, 0) >= PASSED_OVER:
            return prompts[0]
        return min(prompts, key=lambda prompt: prompt.left / len(prompt.rows))
