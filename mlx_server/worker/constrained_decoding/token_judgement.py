"""What is known of the tokens that a mask allows: by how much each lengthens an ending."""

import numpy as np

from mlx_server.worker.constrained_decoding.token_classes import Ids, Mask


class Judgement:
    """The number of tokens by which the tokens of a mask lengthen an ending, as far as they were
    judged."""

    def __init__(
        self,
        waiting: list[Ids],
        plain: int | None,
        reserve: int,
        *,
        reads_text: bool,
        reads_plain_text: bool,
    ) -> None:
        """waiting: groups of tokens that are alike. plain: the growth of the plain tokens, None if
        they are among these groups. reads_text: whether any text may stand here.
        reads_plain_text: whether it may end after any character."""
        self.waiting = waiting
        self.changing: list[Ids] = []
        """Groups of which some tokens change the ending."""
        self.plain = plain
        self.reserve = reserve
        """Tokens by which the others of a group may lengthen the ending more than a sample."""
        self.reads_text = reads_text
        self.reads_plain_text = reads_plain_text
        self.judged: list[tuple[Ids, int]] = []

    def beyond(self, most: int) -> Ids:
        """Returns the tokens that lengthen the ending more, or that were not judged yet."""
        costly = [ids for ids, growth in self.judged if growth > most]
        return np.concatenate([np.zeros(0, dtype=np.intp), *costly, *self.waiting, *self.changing])


def sample_of(ids: Ids) -> list[int]:
    """Returns the positions of three of a class's tokens."""
    return [0, len(ids) // 2, -1]


def one_by_one(ids: Ids) -> list[Ids]:
    return [ids[at : at + 1] for at in range(len(ids))]


def forbid(mask: Mask, ids: Ids) -> None:
    bits = np.uint32(1) << (ids & 31).astype(np.uint32)
    np.bitwise_and.at(mask.view(np.uint32), ids >> 5, ~bits)


def allows(mask: Mask, id: int) -> bool:
    return bool(mask[id >> 5] >> (id & 31) & 1)


def keep_only(mask: Mask, ids: list[int]) -> None:
    """Removes all other tokens: no judgement is needed where the ending takes all that is left."""
    kept = [id for id in ids if allows(mask, id)]
    mask[:] = 0
    for id in kept:
        mask.view(np.uint32)[id >> 5] |= np.uint32(1 << (id & 31))
