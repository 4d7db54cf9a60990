"""Drafts from a row's grammar: the bytes that have to come next, and between them, where the
grammar leaves a choice, what followed the same tokens before."""

from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from mlx_server.worker.speculation.approximate_tokenizer import ApproximateTokenizer
from mlx_server.worker.speculation.draft import Draft, Kind
from mlx_server.worker.speculation.lookup import TokenLookup

FORCED, CHOSEN, USUAL = Kind("grammar", 20), Kind("grammar", 2), Kind("grammar", 0)
"""Kinds of drafted tokens: those that are forced, that followed the last two tokens, or one."""

MOST_BYTES = 256
"""The bytes of forced text that are cut into tokens at once."""


class ForcedText:
    def __init__(
        self,
        matcher: Callable[[Sequence[int]], LLMatcher | None],
        tokenizer: ApproximateTokenizer,
        lookup: TokenLookup,
    ) -> None:
        """matcher: returns the row's after the whole answer, which it is given; it may read on if
        that is taken back. None if the row has none now. lookup: that of the row, which the caller
        extends first."""
        self._matcher, self._tokenizer, self._lookup = matcher, tokenizer, lookup
        self._answer = list[int]()
        self._current: LLMatcher | None = None
        """The matcher after the whole answer."""
        self._followers = dict[int, int]()
        """What followed each token of the answer, the latest time."""

    def extend(self, tokens: Sequence[int]) -> None:
        self._current = None
        for token in tokens:
            if self._answer:
                self._followers[self._answer[-1]] = token
            self._answer.append(token)

    def _now(self) -> LLMatcher | None:
        if self._current is None:
            self._current = self._matcher(self._answer)
        return self._current

    def allowed(self, draft: Draft) -> Draft | None:
        """Returns the beginning of a draft that the grammar allows."""
        matcher = self._now()
        return draft.cut(matcher.validate_tokens(draft.tokens)) if matcher else draft

    def draft(self, most: int) -> Draft | None:
        matcher = self._now()
        tokens, kinds = list[int](), list[Kind]()
        while matcher and len(tokens) < most and not matcher.is_stopped():
            # the last token is left out, as it may go on with what is not forced
            text = matcher.compute_ff_bytes()[:MOST_BYTES]
            following = self._tokenizer.tokens(text, most - len(tokens) + 1)[:-1]
            kind = FORCED
            if not following:
                following, kind = self._likely(tokens)
            count = matcher.try_consume_tokens(following) if following else 0
            if not count:
                break
            tokens += following[:count]
            kinds += [kind] * count
        if matcher:
            matcher.rollback(len(tokens))
        return Draft(tokens, "grammar", 0, kinds) if tokens else None

    def _likely(self, tokens: list[int]) -> tuple[list[int], Kind]:
        """Returns what followed the last token in the answer, or the last two in the prompt: JSON
        goes on as its writer began."""
        last = (tokens or self._answer)[-1:]
        usual = self._followers.get(last[0]) if last else None
        if usual is not None:
            return [usual], USUAL
        follower = self._lookup.follower(tokens)
        return ([] if follower is None else [follower]), CHOSEN
