"""Completes a row's grammar before the row reaches its token limit.

From any state of a matcher an ending can be found: tokens that lead to where the grammar may stop
(see ending_search.py). While far more tokens are left than the ending needs, nothing is restricted.
Later a token is allowed only if the ending that it would require still fits. So text and numbers
continue while there is room, new members and items begin only where they can be finished, and in
the end only the ending itself is allowed.

Parsing theory calls such an ending a completion of a viable prefix; here the shortest known one is
kept for each row. An example, with tokens of one byte and a required `name` and `age`: after
`{"name":"An` the ending is `","age":0}`, which is 10 tokens and the stop token.

    tokens left   allowed next
    100           all that the grammar allows: the ending is not even searched
    12            `n` (11 tokens are left, as the ending needs), not `\\` (an escape takes one more)
    11            `"` only, with which the ending begins

After `"` the ending is the rest of the known one, and is not searched again.
"""

from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from mlx_server.worker.constrained_decoding.completion_proposals import CompletionProposals
from mlx_server.worker.constrained_decoding.ending_search import EndingSearch
from mlx_server.worker.constrained_decoding.lazy_matcher import LazyMatcher
from mlx_server.worker.constrained_decoding.matcher_probe import CONSUMED, Probe
from mlx_server.worker.constrained_decoding.token_classes import Ids, Mask, TokenClasses
from mlx_server.worker.constrained_decoding.token_judgement import (
    Judgement,
    allows,
    forbid,
    keep_only,
    one_by_one,
    sample_of,
)

FEW = 8
"""The size above which a class of tokens is represented by a sample of three."""

RESERVE = 2
"""Tokens by which the others of a class may lengthen the ending more than the sample."""

MARGIN = 8
"""A row is restricted up to this many tokens before what its ending and a token may need."""

FIRST_WORK = 80_000
"""The work that the search from a grammar's beginning may spend, where the grammar is compiled."""

BEGINNING = 16
"""The fewest tokens of an ending that are tried after a token that can't lead out of a text: free
text takes all of them up to where the ending leaves it."""

STEP_WORK = 400
"""The work that one row may spend between two of its tokens on finding an ending and on judging the
tokens that may come next: a millisecond or two, of which the matcher takes a third and Python the
rest."""

GROUPED = 30
"""The work of dividing a mask's tokens into groups, which takes as long as so many calls."""

TOKEN_WORK = 120
"""The work that the search after one of the allowed tokens may spend."""

SEARCHED_AHEAD = 32
"""The number of tokens before its first use at which the search's matcher is built and begins to
follow the row."""

FOLLOWED = 32
"""The most tokens by which the search's matcher catches up with the row in one step."""

SHARED = 4
"""The most endings of other tokens that are tried before a token's own is searched."""

LONGEST_ENDING = 256
"""The most tokens of an ending that takes the place of what a row repeats."""

NEVER = 1 << 20
"""The cost of a token after which no ending was found."""


@dataclass(frozen=True)
class CompletionHints:
    """The results about a grammar's endings at compile time, shared by all of its rows."""

    proposals: CompletionProposals
    tokens: list[int] | None = None
    """An ending from the grammar's start; None if none was found."""

    @property
    def reach(self) -> int:
        """A row with this many tokens more than its ending needs is not restricted."""
        return self.proposals.growth + self.proposals.reserve + MARGIN

    def next_search(self, remaining: int, ending: list[int] | None = None) -> int:
        """Returns how many tokens are left when an ending has to be known next.

        ending: the present one, that of the grammar's start by default.
        """
        known = self.tokens if ending is None else ending
        slack = -1 if known is None else remaining - 1 - len(known)
        if slack <= self.reach:
            return remaining
        return remaining - max(1, (slack - self.reach) // (1 + self.proposals.growth))


def searched_hints(
    classes: TokenClasses, matcher: LLMatcher, proposals: CompletionProposals
) -> CompletionHints:
    """Finds an ending from the grammar's beginning, in a thread where no row waits.

    matcher: in its initial state, where it is left.
    """
    probe = Probe(matcher, classes)
    probe.allow(FIRST_WORK)
    return CompletionHints(proposals, EndingSearch(classes, proposals).find(probe, [], NEVER))


def known_hints(
    classes: TokenClasses, matcher: LLMatcher, proposals: CompletionProposals
) -> CompletionHints:
    """Finds out whether a proposal is an ending of the grammar, with few of the lexer's states."""
    probe = Probe(matcher, classes)
    probe.allow(STEP_WORK)
    return CompletionHints(proposals, EndingSearch(classes, proposals).known_end(probe))


class GrammarCompletion:
    """Restricts one row's tokens so that its grammar can be completed within the token limit."""

    def __init__(self, classes: TokenClasses, hints: CompletionHints, matcher: LazyMatcher) -> None:
        """matcher: for the search alone, in the state in which the row's own began."""
        self._classes = classes
        self._hints = hints
        self._search = EndingSearch(classes, hints.proposals)
        self._proposals = hints.proposals
        self._matcher = matcher
        self._follower: Probe | None = None
        """The search's matcher at the row's position; made when the row comes near its limit."""
        self._unread: list[int] = []
        """The tokens that the probe has not followed yet."""
        self._tokens = hints.tokens
        """The latest ending that was found; None if there was none."""
        self._read = 0
        """The bytes that the row has added since that ending was found."""
        self._fits = hints.tokens is not None
        """Whether that ending completes the grammar from the present state."""
        self._next = NEVER * NEVER
        """The remaining tokens at which the next search is due."""
        self._judgement: tuple[bytes, list[int], Judgement] | None = None
        """The latest judgement, with the mask and the ending that it was made for."""
        self._endings: dict[int, list[int]] = {}
        """The endings that were found after some of the tokens that may come next."""
        self._found: list[list[int]] = []
        """Those of them that were searched, without repetitions, the latest first."""
        self._changing = set[int]()
        """The tokens that may come next after which the present ending does not fit."""

    @property
    def ending(self) -> list[int] | None:
        """The ending that `allow` found last; None if there was none."""
        return self._tokens

    def advance(self, token: int) -> None:
        """Follows the row's latest token."""
        self._unread.append(token)
        following, *rest = self._tokens or [-1]
        if self._fits and following == token:
            self._tokens = rest
        elif token in self._endings:
            self._tokens, self._fits, self._read = self._endings[token], True, 0
        else:
            self._fits = False
            self._read += self._classes.bytes_of(token)
        self._endings, self._found, self._changing = {}, [], set()

    def abandon(self) -> None:
        """Ends a search that another thread may be making."""
        if self._follower is not None:
            self._follower.matcher.is_abandoned = True

    def extend(self) -> None:
        """Begins with a new token limit."""
        self._next = NEVER * NEVER

    def allow(self, mask: Mask, remaining: int) -> None:
        """Removes the tokens from the matcher's present mask that would leave no room for an
        ending. remaining: the tokens left to the row, including the next one and a stop token."""
        if remaining > self._next:
            if remaining <= self._next + SEARCHED_AHEAD + len(self._unread) // FOLLOWED:
                self._follow()
            return
        if self._fits and self._tokens is not None:
            self._next = self._hints.next_search(remaining, self._tokens)
            if self._next < remaining:
                return
        self._find(mask)
        if self._probe.failed:
            return
        if not self._fits or self._tokens is None or len(self._tokens) >= remaining:
            self._next = remaining - 1 - remaining // 8
            return
        self._next = self._hints.next_search(remaining, self._tokens)
        if self._next < remaining:
            return
        most = remaining - 2 - len(self._tokens)
        if most < 0 and self._tokens and allows(mask, self._tokens[0]):
            keep_only(mask, [self._tokens[0], *self._classes.stops])
            return
        self._restrict(mask, most, self._judged_for(mask, self._tokens, max(0, remaining - 2)))

    def end(self, mask: Mask) -> bool:
        """Removes all tokens but the ending's first one from the mask. Returns False if no ending
        is known, or only one that is so long that the grammar demands what the row writes."""
        self._find(mask)
        first, *rest = self._tokens or self._classes.stops
        ends = self._fits and len(rest) < LONGEST_ENDING and allows(mask, first)
        if ends:
            keep_only(mask, [first])
        return ends

    def _find(self, mask: Mask) -> None:
        """Finds an ending from the present state, unless the latest one fits."""
        probe = self._probe
        if probe.failed:
            return
        probe.allow(STEP_WORK)
        probe.see(mask)
        if not self._fits:
            found = self._search.find(probe, self._tokens or [], NEVER, self._read)
            if found is not None:
                self._tokens, self._fits, self._read = found, True, 0

    def _follow(self) -> None:
        """Lets the search's matcher catch up with the row, some tokens at each step."""
        if self._follower is None and self._matcher.begin().done():
            self._follower = self._new_follower()
        if self._follower is not None:
            for token in self._unread[:FOLLOWED]:
                self._follower.advance(token)
            del self._unread[:FOLLOWED]

    @property
    def _probe(self) -> Probe:
        """The matcher at the row's position; waits for the search's matcher if it is not built
        yet."""
        if self._follower is None:
            self._follower = self._new_follower()
        for token in self._unread:
            self._follower.advance(token)
        self._unread.clear()
        return self._follower

    def _new_follower(self) -> Probe:
        return Probe(self._matcher.copy(), self._classes, self._proposals.width)

    def _restrict(self, mask: Mask, most: int, judged: Judgement) -> None:
        following = next(iter(self._tokens or ()), -1)
        keeps = following >= 0 and allows(mask, following)
        if judged.plain is not None and judged.plain > most:
            np.bitwise_and(mask, ~self._classes.plain[: len(mask)], out=mask)
        forbid(mask, judged.beyond(most))
        if keeps:
            mask.view(np.uint32)[following >> 5] |= np.uint32(1 << (following & 31))

    def _judged_for(self, mask: Mask, ending: list[int], limit: int) -> Judgement:
        """Returns what is known of the mask's tokens. What can't be judged in one step waits for
        the next one that has the same mask and ending."""
        key = mask.tobytes()
        if not self._judgement or self._judgement[:2] != (key, ending):
            self._judgement = (key, ending, self._begun(mask, ending))
        judgement, probe = self._judgement[2], self._probe
        may_end = judgement.reads_text and not ending  # anywhere in this text
        while judgement.waiting and probe.left:
            ids = judgement.waiting.pop(0)
            probe.spend(1)
            same = self._is_same(ids, judgement)
            some = ids[:1] if same else ids if len(ids) <= FEW else ids[sample_of(ids)]
            if all(self._keeps(id, ending, judgement.reads_plain_text) for id in some.tolist()):
                reserve = -1 if may_end else judgement.reserve * (len(ids) > FEW and not same)
                judgement.judged.append((ids, reserve))
            else:
                judgement.changing.append(ids)
        ink = self._classes.ink  # the shortest are the commonest: a quote with a comma, a bracket
        judgement.changing.sort(key=lambda ids: ink[ids].min())
        while judgement.changing and probe.left:
            ids = judgement.changing.pop(0)
            probe.spend(1)
            same = self._is_same(ids, judgement)
            if 1 < len(ids) <= FEW and not same:
                judgement.changing[:0] = one_by_one(ids)
                continue
            found = self._grown(ids, ending, limit, judgement.reserve, same=same)
            if not probe.left and judgement.judged and any(some[1] >= NEVER for some in found):
                judgement.changing.insert(0, ids)  # perhaps only the work has run out
                break
            for some, growth in found:
                judgement.judged.append((some, -1 if may_end and growth <= RESERVE else growth))
            if len(found) > 1:
                judgement.changing[:0] = one_by_one(np.delete(ids, sample_of(ids)))
        return judgement

    def _begun(self, mask: Mask, ending: list[int]) -> Judgement:
        reads_text = self._search.reads_text(self._probe)
        reads_plain_text = reads_text and self._search.reads_plain_text(self._probe)
        self._probe.spend(GROUPED)
        plain, reserve = None, RESERVE
        if reads_plain_text:
            plain = 0 if ending else -1
        elif reads_text and ending and self._proposals.reserve:
            reserve = max(RESERVE, self._proposals.reserve)
            plain = None if self._proposals.own else reserve
        others = mask if plain is None else mask & ~self._classes.plain[: len(mask)]
        if reads_text:
            grouping = self._classes.by_exit if reads_plain_text else self._classes.by_marks
            groups = sorted(grouping.of(others), key=len, reverse=True)
        else:
            size = self._classes.size
            groups = sorted(self._classes.by_kind.of(others), key=lambda ids: size[ids].min())
        return Judgement(
            groups, plain, reserve, reads_text=reads_text, reads_plain_text=reads_plain_text
        )

    def _is_same(self, ids: Ids, judgement: Judgement) -> bool:
        """Whether these tokens end the text and go on alike: one of them shows what all do."""
        return judgement.reads_plain_text and int(ids[0]) in self._classes.exits

    def _growth_after_any(self, ids: Ids, ending: list[int], limit: int) -> int:
        """Returns by how many tokens each of the tokens lengthens the ending, which do the same."""
        growth = self._growth_after(int(ids[0]), ending, limit)
        if (found := self._endings.get(int(ids[0]))) is not None:
            self._endings.update(dict.fromkeys(ids.tolist(), found))
        return growth

    def _grown(
        self, ids: Ids, ending: list[int], limit: int, reserve: int, *, same: bool
    ) -> list[tuple[Ids, int]]:
        """Returns by how much a token or all of a class lengthen the ending, by a sample of three;
        that of each of these if they differ, and the class is small enough for its others to be
        judged one by one. same: whether one token shows what all do."""
        if same:
            return [(ids, self._growth_after_any(ids, ending, limit))]
        some = one_by_one(ids if len(ids) == 1 else ids[sample_of(ids)])
        growths = [self._growth_after(int(id[0]), ending, limit) for id in some]
        if len({*growths}) == 1 or len(ids) > 4 * FEW:
            return [(ids, max(growths) + reserve * (len(ids) > 1))]
        return [*zip(some, growths, strict=True)]

    def _keeps(self, token: int, ending: list[int], reads_plain_text: bool = False) -> bool:
        """Whether the ending stays the same after this token. In a plain text, a token without
        marks opens nothing: if the ending's beginning fits, so does the rest. In another text the
        token may break a delimiter that has begun, and the text take what should have ended it."""
        if token in self._changing:
            return False
        if reads_plain_text and not self._classes.opens[token]:
            fits = self._probe.fits([token, *ending[: self._beginning(ending)]])
        elif fits := self._probe.fits([token, *ending, self._classes.stop]):
            self._endings[token] = ending
        if not fits:
            self._changing.add(token)
        return fits

    def _beginning(self, ending: list[int]) -> int:
        opens = self._classes.opens
        leaves = next((at for at, id in enumerate(ending) if opens[id]), len(ending))
        return max(BEGINNING, leaves + 2)

    def _growth_after(self, token: int, ending: list[int], limit: int) -> int:
        """Returns by how many tokens this one lengthens the ending; -1 for the ending's own."""
        if ending[:1] == [token]:
            return -1
        if self._keeps(token, ending):
            return 0
        if rest := self._rest_of_character(token, ending):
            self._endings[token] = [*rest, *ending]
            return len(rest)
        found = self._shared_ending(token) or self._ending_after(token, ending, limit)
        if found is None:
            return NEVER
        self._endings[token] = found
        self._found = [found, *(other for other in self._found if other != found)][:SHARED]
        return len(found) - len(ending)

    def _rest_of_character(self, token: int, ending: list[int]) -> list[int]:
        """Returns the rest of the token's final character or escape, if the ending fits after
        it."""
        for rest in self._search.continuations(token):
            if self._probe.fits([token, *rest, *ending, self._classes.stop]):
                return rest
        return []

    def _shared_ending(self, token: int) -> list[int] | None:
        """Returns an ending that was found after another token and fits after this one, which is as
        short as its own in 99 of 100 cases."""
        fits, stop = self._probe.fits, self._classes.stop
        return next((found for found in self._found if fits([token, *found, stop])), None)

    def _ending_after(self, token: int, ending: list[int], limit: int) -> list[int] | None:
        left = self._probe.left
        if not left or not self._probe.take([token]):
            return None
        before = self._probe.work
        self._probe.allow(min(left, TOKEN_WORK))
        found = self._search.find(self._probe, ending, limit, int(self._classes.ink[token]))
        self._probe.back(1)
        self._probe.allow(max(0, left - (self._probe.work - before) - CONSUMED))
        return found
