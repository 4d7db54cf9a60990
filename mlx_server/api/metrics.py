"""Prometheus metrics, counted from the events of answers and the steps of the engine."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client import generate_latest as exposition

from mlx_server.api.answer_metrics import AnswerMetrics
from mlx_server.api.engine_metrics import EngineMetrics
from mlx_server.api.samples import Samples
from mlx_server.engine.messages import StepOutput
from mlx_server.pool.pool import Pool

router = APIRouter()


class Metrics:
    def __init__(self, pool: Pool) -> None:
        self.registry = CollectorRegistry()
        self.answers = AnswerMetrics(self.registry)
        self.engine = EngineMetrics(pool, self.registry)
        self.samples = Samples()
        self.answers.on_first_token = self.samples.first_token

    def on_step(self, step: StepOutput) -> None:
        self.engine.on_step(step)
        self.samples.stepped(step)

    def exposition(self) -> bytes:
        self.engine.refresh()
        return exposition(self.registry)


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    found: Metrics = http.app.state.metrics
    return Response(found.exposition(), media_type=CONTENT_TYPE_LATEST)
