"""Every parameter that there is, by the class and the field that take it."""

from tests.hostile.parameters.chatting import CHATTING
from tests.hostile.parameters.elsewhere import ELSEWHERE
from tests.hostile.parameters.embedding import EMBEDDING
from tests.hostile.parameters.messaging import MESSAGING
from tests.hostile.parameters.ollamas import OLLAMAS
from tests.hostile.parameters.owning import OWNING
from tests.hostile.parameters.ranking import RANKING
from tests.hostile.parameters.responding import RESPONDING
from tests.hostile.parameters.tokenizing import TOKENIZING

__all__ = [
    "CHATTING",
    "ELSEWHERE",
    "EMBEDDING",
    "MESSAGING",
    "OLLAMAS",
    "OWNING",
    "RANKING",
    "RESPONDING",
    "TOKENIZING",
]
