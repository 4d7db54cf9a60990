"""Searches tokens that lead from a matcher's state to where its grammar may stop.

The search proposes the sequences of the grammar's guide, the shortest first, and asks the matcher
which of them fit; it computes no mask, as that may take milliseconds in a state that is new. What
it may spend is counted in calls of the matcher, not in time, so that an answer does not depend on
how busy the machine is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain, islice

from llguidance import LLMatcher

from mlx_server.worker.constrained_decoding.completion_guide import (
    CompletionGuide,
    Proposals,
    Ways,
)
from mlx_server.worker.constrained_decoding.token_classes import TokenClasses

TAILS = 8
"""The known ending is tried again without its first 0 to TAILS - 1 tokens."""

WIDTH = 6
"""Ways of a kind of which each is tried before one of them is followed further."""

SHORTEST = 24
"""The number of the shortest texts that are tried before the longest ones: a pattern's whole text
often fits where none of its shorter ends does."""

CONSUMED = 6
"""The cost of consuming a token. To ask whether tokens fit costs 1, and 1 more for every eight of
them: one or two microseconds."""

FORCED = 256
"""Bytes of forced text that are followed at once, at most."""

CONTINUATION = [b"\x80", b"\xa0", b"\x90"]
"""Bytes that continue a character which a token began; one of them always may."""

ESCAPED = [b"n", b"u0000", b"0000", b"000", b"00"]
"""Texts that complete an escape in a JSON text."""


class Probe:
    """A matcher that the search moves and moves back, as long as it may."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.work = 0
        self._until = 0
        self._taken = 0
        """Tokens that were taken and not given back."""
        self._excluded: dict[int, AbstractSet[int]] = {}
        """The bytes that may not come next, by the tokens that were taken before."""

    def allow(self, work: int) -> None:
        """Sets what may be spent from now on; nothing fits after that."""
        self._until = self.work + work

    @property
    def left(self) -> int:
        return max(0, self._until - self.work)

    def fitting(self, tokens: list[int]) -> int:
        if self.work >= self._until:
            return 0
        count = self.matcher.validate_tokens(tokens)
        self.work += 1 + count // 8
        return count

    def fits(self, tokens: list[int]) -> bool:
        if self.work >= self._until:
            return False
        count = self.matcher.validate_tokens(tokens)
        self.work += 1 + count // 8
        return count == len(tokens)

    def excluded(self, byte_tokens: Mapping[int, int]) -> AbstractSet[int]:
        """Returns which of the bytes may not come next. byte_tokens: their tokens."""
        if not self.left:
            return frozenset()
        if self._taken not in self._excluded:
            fits = self.matcher.validate_tokens
            found = frozenset(byte for byte, token in byte_tokens.items() if not fits([token]))
            self._excluded[self._taken] = found
            self.work += len(byte_tokens) // 4
        return self._excluded[self._taken]

    def take(self, tokens: list[int]) -> bool:
        self.work += CONSUMED * len(tokens)
        self._taken += len(tokens)
        self._excluded.pop(self._taken, None)
        return self.matcher.consume_tokens(tokens)

    def back(self, count: int) -> None:
        self._taken -= count
        self.matcher.rollback(count)

    def advance(self, token: int) -> None:
        """Follows the row, whose tokens are not given back."""
        self._taken, self._excluded = 0, {}
        self.matcher.consume_token(token)

    def forced(self) -> bytes:
        self.work += CONSUMED
        # the matcher itself would keep these bytes, and could not be moved back past them
        return self.matcher.deep_copy().compute_ff_bytes()

    @property
    def accepts(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def failed(self) -> bool:
        return self.matcher.is_error()


class EndingSearch:
    def __init__(self, classes: TokenClasses, guide: CompletionGuide) -> None:
        self._classes = classes
        self._guide = guide
        self._quotes = _each(classes.quotes)
        self._closers = _each(classes.closers)
        self._comma = _each(classes.comma)
        self._colon = _each(classes.known([b":"]))
        self._commas = [classes.cut(text) for text in (b",", b',"')]
        self._openers = _each(classes.known(b'{ [ " - : , 1 0'.split()))
        self._fillers = _each(classes.fillers)
        self._single = _each(classes.single)
        self._continuation = _each(classes.known(CONTINUATION))
        self._escaped = [way for text in ESCAPED if (way := classes.cut(text))]

    def continuations(self, token: int) -> Ways:
        """Ways to complete the last character of a token's text, or its escape."""
        missing = self._classes.missing(token)
        if missing and self._continuation:
            rest = self._continuation[0] * (missing - 1)
            return [[*first, *rest] for first in self._continuation]
        return self._escaped[:1] if self._classes.ends_with_escape(token) else []

    def find(self, probe: Probe, known: list[int], limit: int, read: int = 0) -> list[int] | None:
        """Returns a short ending of at most `limit` tokens, not always the shortest.

        known: the latest ending, of which all or the end may fit still. read: the bytes that were
        read since. Returns None if none was found. The probe is left where it was.
        """
        tails = self._tails(known, read)
        path: Ways = []
        choices: list[Iterator[list[int]]] = []
        while (found := self._known_end(probe, tails)) is None:
            choices.append(self._moves(probe, path, tails))
            while choices and not self._extend(path, choices[-1], probe, limit):
                choices.pop()
                probe.back(len(path.pop()) if path else 0)
            if not choices:
                return None
        tokens = [*chain(*path)]
        probe.back(len(tokens))
        ending = [*self._joined(tokens), *found]
        return ending if len(ending) <= limit else None

    def known_end(self, probe: Probe) -> list[int] | None:
        """Returns what is known to end the grammar, without a search."""
        return self._known_end(probe, [])

    def _tails(self, known: list[int], read: int) -> Ways:
        """Returns what is left of the known ending, the shortest first."""
        tails = [known[at:] for at in range(min(len(known), TAILS))][::-1]
        if read and (unread := self._without(known, read)):
            tails.insert(-1, unread)
        # a member of the known ending may come after another one
        tails += [[*comma, *known] for comma in self._commas if known]
        return [[*tail, self._classes.stop] for tail in tails]

    def _without(self, ending: list[int], size: int) -> list[int]:
        """Returns an ending without its first bytes, up to a control token."""
        texts = self._classes.texts
        for at, token in enumerate(ending):
            if not size or token in self._classes.apart:
                return ending[at:]
            if size < len(texts[token]):
                return [*self._classes.cut(texts[token][size:]), *ending[at + 1 :]]
            size -= len(texts[token])
        return []

    def _known_end(self, probe: Probe, tails: Ways) -> list[int] | None:
        """Returns what is known to end the grammar from here on."""
        if probe.accepts:
            return []
        if (known := next((tail[:-1] for tail in tails if probe.fits(tail)), None)) is not None:
            return known
        endings = self._guide.endings
        some = (
            endings.after_control()
            if self.reads_text(probe)
            else endings.without(self._excluded(probe))
        )
        stop = self._classes.stop
        return next((way for way in self._fitting(probe, some) if probe.fits([*way, stop])), None)

    def _extend(self, path: Ways, choices: Iterator[list[int]], probe: Probe, limit: int) -> bool:
        """Follows the next one of the choices; returns False if there is none."""
        size = sum(map(len, path))
        for step in choices:
            if not probe.left:
                return False
            if size + len(step) <= limit and probe.take(step):
                path.append(step)
                return True
        return False

    def _moves(self, probe: Probe, path: Ways, tails: Ways) -> Iterator[list[int]]:
        """Proposes what may lead closer to an end, the best of each kind first.

        Of texts and characters it prefers those that the path does not have yet, so that the search
        gets out of a repetition.
        """
        used = Counter(map(tuple, path))

        def unused_first(ways: Ways) -> Ways:
            return sorted(ways, key=lambda way: used[tuple(way)])

        own = unused_first(self._guide.own)
        if self.reads_text(probe):
            yield from self._leaving(probe, own)
            yield from self._fitting(probe, self._fillers)
            return
        for ways in chain(self._proposals(probe), [self._fitting(probe, own)]):
            near = [*islice(ways, WIDTH)]
            last = len(near) > 1 and next((w for w in near if self._ends(probe, w, tails)), None)
            if last:
                yield last
            yield from near
            yield from ways
        for few in (self._openers, self._escaped, self._single):
            yield from self._fitting(probe, unused_first(few))
        yield from self._fitting(probe, self._fillers)

    def _proposals(self, probe: Probe) -> Iterator[Iterator[list[int]]]:
        """Proposes ways of each kind, the best kind first."""
        guide = self._guide
        yield self._fitting(probe, self._continuation)
        yield self._fitting(probe, self._closers)
        for ways in chain(
            self._proposed(probe, guide.required), self._proposed(probe, guide.following)
        ):
            yield self._whole_values(probe, ways)
        yield self._fitting(probe, self._comma)
        yield from self._proposed(probe, guide.tails)
        for ways in self._proposed(probe, guide.values):
            yield self._whole_values(probe, ways)
        yield from self._proposed(probe, guide.members)
        yield iter(self._forced(probe))
        for ways in self._proposed(probe, guide.numbers):
            yield self._whole_values(probe, ways)
        yield self._fitting(probe, self._colon)

    def _ends(self, probe: Probe, way: list[int], tails: Ways) -> bool:
        """Whether what ends the grammar after this way is known."""
        if not probe.left or not probe.take(way):
            return False
        found = self._known_end(probe, tails)
        probe.back(len(way))
        return found is not None

    def reads_text(self, probe: Probe) -> bool:
        """Whether any text may stand here."""
        return bool(self._classes.prose) and all(probe.fits([id]) for id in self._classes.prose)

    def _excluded(self, probe: Probe) -> AbstractSet[int]:
        return probe.excluded(self._classes.printable)

    def reads_plain_text(self, probe: Probe) -> bool:
        """Whether a quoted text is read that may end after any character."""
        samples = self._classes.samples
        return any(
            all(probe.fits([id, *quote]) for id in samples)
            and not all(probe.fits([*quote, id]) for id in self._classes.prose)
            for quote in self._quotes
        )

    def _leaving(self, probe: Probe, own: Ways) -> Iterator[list[int]]:
        """Proposes what ends free text."""
        tails = chain.from_iterable(self._proposed(probe, self._guide.tails))
        for way in chain(self._fitting(probe, self._quotes), tails, self._fitting(probe, own)):
            if probe.take(way):
                left = probe.accepts or not self.reads_text(probe)
                probe.back(len(way))
                if left:
                    yield way

    def _whole_values(self, probe: Probe, ways: Iterator[list[int]]) -> Iterator[list[int]]:
        """Proposes ways after which the value is complete: one digit may not be all of a number."""
        for way in ways:
            if any(probe.fits([*way, after]) for after in self._classes.after):
                yield way

    def _proposed(self, probe: Probe, proposals: Proposals) -> Iterator[Iterator[list[int]]]:
        """Proposes the shortest texts that fit, then the others, the longest first."""
        texts = proposals.without(self._excluded(probe))
        for some in (texts[:SHORTEST], reversed(texts[SHORTEST:])):
            yield self._fitting(probe, map(proposals.tokens, some))

    def _fitting(self, probe: Probe, ways: Iterable[list[int]]) -> Iterator[list[int]]:
        excluded, first = self._excluded(probe), self._classes.first
        refused: set[tuple[int, ...]] = set()
        for way in ways:
            if not probe.left:
                return
            if not way or first[way[0]] in excluded:
                continue
            if (way[0],) in refused or (*way[:2],) in refused:
                continue
            count = probe.fitting(way)
            if count == len(way):
                yield way
            elif count < 2:
                refused.add((*way[: count + 1],))

    def _forced(self, probe: Probe) -> Ways:
        text = probe.forced()[:FORCED]
        way = self._classes.cut(text) if text and b"\xff" not in text else []
        return [way] if way and probe.fits(way) else []

    def _joined(self, tokens: list[int]) -> list[int]:
        """The same text in longer tokens."""
        classes = self._classes
        if len(tokens) < 2:
            return tokens
        joined: list[int] = []
        text = b""
        for token in tokens:
            if token in classes.apart:
                joined += [*classes.cut(text), token]
                text = b""
            else:
                text += classes.texts[token]
        return joined + classes.cut(text)


def _each(ids: list[int]) -> Ways:
    return [[id] for id in ids]
