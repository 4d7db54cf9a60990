"""Searches tokens that lead from a matcher's state to where its grammar may stop.

The search proposes the sequences of the grammar's guide, the shortest first, and asks the matcher
which of them fit; it computes no mask, as that may take milliseconds in a state that is new. What
it may spend is counted in calls of the matcher, not in time, so that an answer does not depend on
how busy the machine is.
"""

from collections import Counter
from collections.abc import Iterator

from llguidance import LLMatcher

from mlx_server.worker.constrained_decoding.completion_guide import CompletionGuide, Ways
from mlx_server.worker.constrained_decoding.token_classes import TokenClasses

TAILS = 10
"""The known ending is tried again without its first 0 to TAILS - 1 tokens."""

CONSUMED = 4
"""What it costs to consume a token. To ask whether tokens fit costs 1, and 1 more for every eight
of them: one or two microseconds."""

FORCED = 256
"""Bytes of forced text that are followed at once, at most."""

CONTINUATION = [b"\x80", b"\xa0", b"\x90"]
"""Bytes that continue a character which a token began; one of them always may."""

ESCAPED = [b"n", b"u0000", b"0000", b"000", b"00"]
"""What completes an escape in a JSON text."""


class Probe:
    """A matcher that the search moves and moves back, as long as it may."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.work = 0
        self._until = 0

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
        return self.fitting(tokens) == len(tokens)

    def take(self, tokens: list[int]) -> bool:
        self.work += CONSUMED * len(tokens)
        return self.matcher.consume_tokens(tokens)

    def back(self, count: int) -> None:
        self.matcher.rollback(count)

    def forced(self) -> bytes:
        self.work += CONSUMED
        # the matcher itself would keep these bytes, and not be moved back behind them
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
        self._openers = _each(classes.known(b'{ [ " - : , 1 0'.split()))
        self._fillers = _each(classes.fillers)
        self._single = _each(classes.single)
        self._continuation = _each(classes.known(CONTINUATION))
        self._escaped = [way for text in ESCAPED if (way := classes.cut(text))]

    def find(self, probe: Probe, known: list[int], limit: int) -> list[int] | None:
        """Returns a short ending of at most `limit` tokens, not always the shortest.

        known: the latest ending, which may fit still, or the end of it. Returns None if none was
        found. The probe is left where it was.
        """
        tails = [[*known[at:], self._classes.stop] for at in range(min(len(known), TAILS))][::-1]
        path: list[list[int]] = []
        choices: list[Iterator[list[int]]] = []
        while (found := self._known_end(probe, tails)) is None:
            choices.append(self._moves(probe, path))
            while choices and not self._extend(path, choices[-1], probe, limit):
                choices.pop()
                probe.back(len(path.pop()) if path else 0)
            if not choices:
                return None
        tokens = [token for step in path for token in step]
        probe.back(len(tokens))
        ending = [*self._joined(tokens), *found]
        return ending if len(ending) <= limit else None

    def _known_end(self, probe: Probe, tails: Ways) -> list[int] | None:
        """Returns what is known to end the grammar from here on."""
        if probe.accepts:
            return []
        return next((tail[:-1] for tail in tails if probe.fits(tail)), None)

    def _extend(
        self, path: list[list[int]], choices: Iterator[list[int]], probe: Probe, limit: int
    ) -> bool:
        """Follows the next one of the choices; returns False if there is none."""
        size = sum(map(len, path))
        for step in choices:
            if not probe.left:
                return False
            if size + len(step) <= limit and probe.take(step):
                path.append(step)
                return True
        return False

    def reads_text(self, probe: Probe) -> bool:
        """Whether any text may stand here."""
        return bool(self._classes.prose) and all(probe.fits([id]) for id in self._classes.prose)

    def reads_plain_text(self, probe: Probe) -> bool:
        """Whether a quoted text is read that may end after any character."""
        samples = self._classes.samples
        return any(
            all(probe.fits([id, *quote]) for id in samples)
            and not all(probe.fits([*quote, id]) for id in self._classes.prose)
            for quote in self._quotes
        )

    def _moves(self, probe: Probe, path: Ways) -> Iterator[list[int]]:
        """Proposes what may lead closer to an end, the best first.

        Of texts and characters it prefers those that the path does not have yet, so that the search
        gets out of a repetition.
        """
        used = Counter(map(tuple, path))

        def unused_first(ways: Ways) -> Ways:
            return sorted(ways, key=lambda way: used[tuple(way)])

        own = [*unused_first(self._guide.controls), *unused_first(self._guide.literals)]
        if self.reads_text(probe):
            yield from self._leaving(probe, own)
            yield from self._fitting(probe, self._fillers)
            return
        yield from self._fitting(probe, self._continuation)
        yield from self._fitting(probe, self._guide.whole)
        yield from self._fitting(probe, self._closers)
        if any(map(probe.fits, self._comma)):
            yield from self._whole_values(probe, self._guide.following)
            yield from self._fitting(probe, self._comma)
        yield from self._fitting(probe, self._guide.tails)
        yield from self._whole_values(probe, self._guide.values)
        yield from self._fitting(probe, self._guide.members)
        if forced := self._forced(probe):
            yield forced
        yield from self._whole_values(probe, self._guide.numbers)
        yield from self._fitting(probe, own)
        for few in (self._openers, self._escaped, self._single):
            yield from self._fitting(probe, unused_first(few))
        yield from self._fitting(probe, self._fillers)

    def _leaving(self, probe: Probe, own: Ways) -> Iterator[list[int]]:
        """Proposes what ends free text."""
        for ways in (self._quotes, self._guide.tails, own):
            for way in self._fitting(probe, ways):
                if probe.take(way):
                    left = probe.accepts or not self.reads_text(probe)
                    probe.back(len(way))
                    if left:
                        yield way

    def _whole_values(self, probe: Probe, ways: Ways) -> Iterator[list[int]]:
        """Proposes ways after which the value is complete: one digit may not be all of a number."""
        for way in self._fitting(probe, ways):
            if any(probe.fits([*way, after]) for after in self._classes.after):
                yield way

    def _fitting(self, probe: Probe, ways: Ways) -> Iterator[list[int]]:
        refused: set[tuple[int, ...]] = set()
        for way in ways:
            if not probe.left:
                return
            if (way[0],) in refused or (*way[:2],) in refused:
                continue
            count = probe.fitting(way)
            if count == len(way):
                yield way
            elif count < 2:
                refused.add((*way[: count + 1],))

    def _forced(self, probe: Probe) -> list[int]:
        text = probe.forced()[:FORCED]
        way = self._classes.cut(text) if text and b"\xff" not in text else []
        return way if way and probe.fits(way) else []

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
