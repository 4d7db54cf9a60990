"""Of `/v1/rerank`."""

from collections.abc import Mapping

from pydantic import BaseModel

from mlx_server.api import rerank
from tests.hostile.parameters.case import Shown

LIVE = "tests/live/test_rerank.py"

PLAIN = f"{LIVE}::test_the_scores_are_those_of_a_plain_computation"

RANKING: Mapping[type[BaseModel], Mapping[str, Shown]] = {
    rerank.RerankBody: {
        "model": PLAIN,
        "query": PLAIN,
        "documents": PLAIN,
        "instruction": PLAIN,
        "top_n": f"{LIVE}::test_the_best_of_them",
        "return_documents": "tests/api/rerank/test_router.py"
        "::test_the_documents_are_ranked_and_returned_if_that_was_asked_for",
    },
    rerank.RankedDocument: {
        "text": "tests/api/rerank/test_router.py"
        "::test_the_documents_are_ranked_and_returned_if_that_was_asked_for"
    },
}
