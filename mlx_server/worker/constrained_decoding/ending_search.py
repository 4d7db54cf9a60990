"""Searches tokens that lead from a matcher's state to where its grammar may stop.

It is a depth-first search of a bounded cost. Each step tries the grammar's proposals, the shortest
first, and asks the matcher which of them fit. The row's own mask says what may come first where it
stands; further on no mask is computed, as that may take milliseconds in a state that is new. The
cost is counted in calls of the matcher, not in time, so that an answer does not depend on how busy
the machine is.

An example: after `{"name":"An` the proposed tail `"` leaves the text, the proposal of a required
member `,"age":0` fits next, and the grammar accepts the closing `}`: the ending is `","age":0}`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from mlx_server.worker.constrained_decoding.completion_proposals import (
    CompletionProposals,
    TextProposals,
    TokenSequences,
)
from mlx_server.worker.constrained_decoding.matcher_probe import Probe
from mlx_server.worker.constrained_decoding.token_classes import TokenClasses

TAILS = 8
"""The known ending is tried again without its first 0 to TAILS - 1 tokens."""

COSTLY_TAILS = 2
"""The same limit after a digit in a wide object, where each attempt is costly."""

CLOSING = 8
"""The most places of the known ending at which an object that takes any name may end."""

WIDTH = 6
"""Sequences of one kind that are tried before the search goes deeper along one of them."""

SHORTEST = 24
"""The number of the shortest texts that are tried before the longest ones: a pattern's whole text
often fits where none of its shorter ends does."""

SKIPPED = 8
"""Sequences that are gone through at a cost of 1, as most are refused without a call of the
matcher."""

FORCED = 256
"""The most bytes of forced text that are followed at once."""

CONTINUATION = [b"\x80", b"\xa0", b"\x90"]
"""Bytes that continue a character which a token began; one of them always may."""

FREE_MEMBERS = [
    name + value for name in (b'"":', b'":', b":") for value in (b'""', b"0", b"[]", b"{}", b"null")
]
"""Members of objects that take any name, from their beginning, inside their name and after it."""

ESCAPED = [b"n", b"u0000", b"0000", b"000", b"00"]
"""Texts that complete an escape in a JSON text."""


class EndingSearch:
    def __init__(self, classes: TokenClasses, proposals: CompletionProposals) -> None:
        self._classes = classes
        self._proposed_texts = proposals
        self._quotes = _each(classes.quotes)
        self._closers = _each(classes.closers)
        self._comma = _each(classes.comma)
        self._colon = _each(classes.known([b":"]))
        self._commas = [classes.cut(text) for text in (b",", b',"')]
        self._openers = _each(classes.known(b'{ [ " - : , 1 0'.split()))
        self._fillers = _each(classes.fillers)
        self._single = _each(classes.single)
        self._continuation = _each(classes.known(CONTINUATION))
        self._escaped = [sequence for text in ESCAPED if (sequence := classes.cut(text))]
        self._free_members = [sequence for text in FREE_MEMBERS if (sequence := classes.cut(text))]

    def continuations(self, token: int) -> TokenSequences:
        """Returns sequences that complete the last character of a token's text, or its escape."""
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
        tails = self._tails(known, read, is_costly=probe.is_costly)
        path: TokenSequences = []
        choices: list[Iterator[list[int]]] = []
        while (found := self._known_end(probe, tails)) is None:
            ending = None if path else self._after_free_member(probe, known)
            if ending is not None and len(ending) <= limit:
                return ending
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
        """Returns a known ending of the grammar without a search; None if no known one fits."""
        return self._known_end(probe, [])

    def _after_free_member(self, probe: Probe, known: list[int]) -> list[int] | None:
        """Returns the end of the known ending after a member of any name, which may have begun."""
        member = next(self._fitting(probe, self._free_members), None) if known else None
        if member is None or self._reads_quotes(probe):
            return None
        stop = self._classes.stop
        endings = ([*member, *tail] for tail in self._closing_tails(known))
        return next((ending for ending in endings if probe.fits([*ending, stop])), None)

    def _closing_tails(self, known: list[int]) -> Iterator[list[int]]:
        """Returns what is left of the known ending from each of its first brackets and commas, also
        after one more brace: the known ending may have another value in place of the object."""
        brace = self._classes.known([b"}"])
        text = b"".join(self._classes.text_of(token) for token in known[:CLOSING])
        for at in [at for at, byte in enumerate(text) if byte in b"}],"][:CLOSING]:
            tail = self._classes.without(known, at)
            yield tail
            yield [*brace, *tail]

    def _tails(self, known: list[int], read: int, *, is_costly: bool = False) -> TokenSequences:
        """Returns what is left of the known ending, the shortest first. is_costly: whether each of
        them costs as much as a number's end in a wide object; then only the likeliest are tried."""
        most = COSTLY_TAILS if is_costly else TAILS
        tails = [known[at:] for at in range(min(len(known), most))][::-1]
        if read and (unread := self._classes.without(known, read)):
            tails.insert(-1, unread)
        if not is_costly:
            # the rest of a text may have to be another one, such as a pattern's from its beginning
            tails += filter(None, self._classes.after_text(known))
        # a member of the known ending may come after another one
        tails += [[*comma, *known] for comma in self._commas if known]
        return [[*tail, self._classes.stop] for tail in tails]

    def _known_end(self, probe: Probe, tails: TokenSequences) -> list[int] | None:
        """Returns a known ending of the grammar from here on; None if no known one fits."""
        if probe.accepts:
            return []
        if probe.last_byte > 127 and any(map(probe.fits, self._continuation)):
            return None  # a character is incomplete
        if (known := next((tail[:-1] for tail in tails if probe.fits(tail)), None)) is not None:
            return known
        endings = self._proposed_texts.endings
        some = (
            endings.after_control()
            if self.reads_text(probe)
            else endings.without(probe.excluded(endings.bytes))
        )
        stop = self._classes.stop
        return next(
            (sequence for sequence in self._fitting(probe, some) if probe.fits([*sequence, stop])),
            None,
        )

    def _extend(
        self, path: TokenSequences, choices: Iterator[list[int]], probe: Probe, limit: int
    ) -> bool:
        """Follows the next one of the choices; returns False if there is none."""
        size = sum(map(len, path))
        for step in choices:
            if probe.is_spent:
                return False
            if size + len(step) <= limit and probe.take(step):
                path.append(step)
                return True
        return False

    def _moves(
        self, probe: Probe, path: TokenSequences, tails: TokenSequences
    ) -> Iterator[list[int]]:
        """Proposes what may lead closer to an end, the best of each kind first.

        Of texts and characters it prefers those that the path does not have yet, so that the search
        gets out of a repetition.
        """
        used = Counter(map(tuple, path))

        def unused_first(sequences: TokenSequences) -> TokenSequences:
            return sorted(sequences, key=lambda found: used[tuple(found)]) if used else sequences

        own = unused_first(self._proposed_texts.own)
        if self.reads_text(probe):
            yield from self._leaving(probe, own)
            yield from self._fitting(probe, self._fillers)
            return
        for sequences in chain(self._proposals(probe), [self._fitting(probe, own)]):
            near = [*islice(sequences, WIDTH)]
            last = len(near) > 1 and next((w for w in near if self._ends(probe, w, tails)), None)
            if last:
                yield last
            yield from near
            yield from sequences
        for few in (self._openers, self._escaped, self._single):
            yield from self._fitting(probe, unused_first(few))
        yield from self._fitting(probe, self._fillers)

    def _proposals(self, probe: Probe) -> Iterator[Iterator[list[int]]]:
        """Proposes sequences of each kind, the best kind first."""
        texts = self._proposed_texts
        yield self._fitting(probe, self._continuation)
        yield self._fitting(probe, self._closers)
        yield self._fitting(probe, self._colon)  # all that may come after a name in JSON
        for sequences in chain(
            self._proposed(probe, texts.required), self._proposed(probe, texts.following)
        ):
            yield self._whole_values(probe, sequences)
        yield self._fitting(probe, self._comma)
        yield from self._proposed(probe, texts.tails)
        for sequences in self._proposed(probe, texts.values):
            yield self._whole_values(probe, sequences)
        yield from self._proposed(probe, texts.members)
        yield iter(self._forced(probe))
        for sequences in self._proposed(probe, texts.numbers):
            yield self._whole_values(probe, sequences)

    def _ends(self, probe: Probe, sequence: list[int], tails: TokenSequences) -> bool:
        """Whether what ends the grammar after this sequence is known."""
        if probe.is_spent or not probe.take(sequence):
            return False
        found = self._known_end(probe, tails)
        probe.back(len(sequence))
        return found is not None

    def reads_text(self, probe: Probe) -> bool:
        """Whether any text may stand here."""
        return bool(self._classes.prose) and all(probe.fits([id]) for id in self._classes.prose)

    def _reads_quotes(self, probe: Probe) -> bool:
        """Whether a text is read in which quotes mean nothing."""
        quoted = [*self._classes.known([b'"']), *self._classes.prose[:1]]
        return self.reads_text(probe) and probe.fits(quoted)

    def reads_plain_text(self, probe: Probe) -> bool:
        """Whether a quoted text is read that may end after any character."""
        samples = self._classes.samples
        return any(
            all(probe.fits([id, *quote]) for id in samples)
            and not all(probe.fits([*quote, id]) for id in self._classes.prose)
            for quote in self._quotes
        )

    def _leaving(self, probe: Probe, own: TokenSequences) -> Iterator[list[int]]:
        """Proposes what ends free text."""
        tails = chain.from_iterable(self._proposed(probe, self._proposed_texts.tails))
        for sequence in chain(self._fitting(probe, self._quotes), tails, self._fitting(probe, own)):
            if probe.take(sequence):
                left = probe.accepts or not self.reads_text(probe)
                probe.back(len(sequence))
                if left:
                    yield sequence

    def _whole_values(self, probe: Probe, sequences: Iterator[list[int]]) -> Iterator[list[int]]:
        """Proposes sequences that complete a value: one digit may not be all of a number."""
        for sequence in sequences:
            if any(probe.fits([*sequence, after]) for after in self._classes.after):
                yield sequence

    def _proposed(self, probe: Probe, proposals: TextProposals) -> Iterator[Iterator[list[int]]]:
        """Proposes the shortest texts that fit, then the others, the longest first."""
        texts = proposals.without(probe.excluded(proposals.bytes))
        for some in (texts[:SHORTEST], reversed(texts[SHORTEST:])):
            yield self._fitting(probe, map(proposals.tokens, some))

    def _fitting(self, probe: Probe, sequences: Iterable[list[int]]) -> Iterator[list[int]]:
        first = self._classes.first
        refused: set[tuple[int, ...]] = set()
        for at, sequence in enumerate(sequences):
            if at % SKIPPED == 0:
                probe.spend(1)
            if probe.is_spent:
                return
            if not sequence or not probe.begins(first[sequence[0]]):
                continue
            if refused and ((sequence[0],) in refused or (*sequence[:2],) in refused):
                continue
            count = probe.fitting(sequence)
            if count == len(sequence):
                yield sequence
            elif count < 2:
                refused.add((*sequence[: count + 1],))

    def _forced(self, probe: Probe) -> TokenSequences:
        text = probe.forced()[:FORCED]
        sequence = self._classes.cut(text) if text and b"\xff" not in text else []
        return [sequence] if sequence and probe.fits(sequence) else []

    def _joined(self, tokens: list[int]) -> list[int]:
        """Returns the same text in fewer, longer tokens."""
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


def _each(ids: list[int]) -> TokenSequences:
    return [[id] for id in ids]
