"""An engine without a process: it is ready at once and loads anything."""

from mlx_server.engine.client import EngineClient, OnLoading
from mlx_server.engine.messages import (
    NO_CACHES,
    Command,
    KvCost,
    LoadModel,
    MeasureCache,
    ModelLoaded,
    Ready,
)
from mlx_server.errors import ServerError


class StubEngine(EngineClient):
    def __init__(self, vocabulary: int, kv: KvCost = NO_CACHES) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._kv = kv

    @property
    def alive(self) -> bool:
        return True

    async def start(self) -> Ready:
        return Ready(0, gpu=False, recommended_bytes=None)

    async def stop(self, error: ServerError | None = None) -> None: ...

    def send(self, command: Command) -> None: ...

    async def load(self, command: LoadModel, progress: OnLoading) -> ModelLoaded:
        self.read(command.path)
        return ModelLoaded(command.model, self._vocabulary, 0)

    async def unload(self, model: str) -> None: ...

    def read(self, path: str) -> None:
        """Called with the folder of a model that is loaded."""

    async def kv_cost(self, command: MeasureCache) -> KvCost:
        return self._kv
