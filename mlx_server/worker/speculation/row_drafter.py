"""The drafts of one row: from all its sources the one that promises most, and what is learnt of
all of them, whether a pass computed them or not."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from llguidance import LLMatcher

from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.row import Row
from mlx_server.worker.speculation.approximate_tokenizer import ApproximateTokenizer
from mlx_server.worker.speculation.draft import Draft, Drafter
from mlx_server.worker.speculation.forced_text import ForcedText
from mlx_server.worker.speculation.gate import MOST_PACE, PACE_FADE, Gate
from mlx_server.worker.speculation.lookup import TokenLookup
from mlx_server.worker.speculation.text_lookup import TextLookup


class RowDrafter:
    def __init__(self, drafters: Sequence[Drafter], gate: Gate) -> None:
        self._drafters = drafters
        self._grammar = next((each for each in drafters if isinstance(each, ForcedText)), None)
        self._of_model, self._of_row = gate.acceptance, gate.row()
        self._pace = 1.0
        self._open: list[Draft] = []
        """The latest drafts, one of each source, that are compared with what comes."""

    def extend(self, tokens: Sequence[int]) -> None:
        for draft in self._open:
            for at, (drafted, token) in enumerate(zip(draft.tokens, tokens, strict=False)):
                for acceptance in (self._of_model, self._of_row):
                    acceptance.learn(draft.kind(at), drafted == token)
                if drafted != token:
                    break
        self._pace = PACE_FADE * self._pace + (1 - PACE_FADE) * min(len(tokens), MOST_PACE)
        self._open = []
        for drafter in self._drafters:
            drafter.extend(tokens)

    def draft(self, most: int) -> Draft | None:
        drafts = [draft for drafter in self._drafters if (draft := drafter.draft(most))]
        if self._grammar:
            drafts = [allowed for draft in drafts if (allowed := self._grammar.allowed(draft))]
        self._open = [
            replace(draft, chances=self._of_row.chances(draft), pace=self._pace) for draft in drafts
        ]
        return max(self._open, key=lambda draft: sum(draft.chances), default=None)


MatcherAfter = Callable[[Sequence[int]], LLMatcher | None]
"""Returns a row's matcher after its answer; None if it has none now."""


def row_drafter(
    prompt: Sequence[int],
    prediction: Sequence[int],
    matcher: MatcherAfter | None,
    vocabulary: Vocabulary | None,
    gate: Gate,
) -> RowDrafter:
    lookup = TokenLookup(prompt)
    drafters: list[Drafter] = [lookup]
    if prediction:
        drafters.append(TokenLookup(prompt, prediction))
    if vocabulary and vocabulary.stop_tokens:
        classes = vocabulary.token_classes
        tokenizer = ApproximateTokenizer(classes.ids)
        drafters.append(TextLookup(prompt, classes.text_of, tokenizer))
        if matcher:
            drafters.append(ForcedText(matcher, tokenizer, lookup))
    return RowDrafter(drafters, gate)


def drafter_of(
    row: Row, gate: Gate, vocabulary: Callable[[], Vocabulary | None] = lambda: None
) -> Drafter:
    """vocabulary: returns the model's vocabulary, None while it has not been read."""

    def matcher(answer: Sequence[int]) -> LLMatcher | None:
        # read now, since accepted drafts replace the constraint
        return row.constraint.matcher_after(answer) if row.constraint else None

    prompt, prediction = row.request.prompt, row.request.prediction
    constrained = matcher if row.constraint else None
    return row_drafter(prompt, prediction, constrained, vocabulary(), gate)
