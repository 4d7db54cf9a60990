"""The models of the policy: which are in memory, what they take, and which may be evicted."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mlx_server.pool.actions import ModelFacts, State


@dataclass
class ResidentModel:
    id: str
    facts: ModelFacts
    weights: int
    extra_bytes: int = 0
    state: State = "unloaded"
    leases: int = 0
    last_used: float | None = None
    requested_ttl: float | None = None
    """The seconds that a request set in place of `ttl`, until the model is unloaded. They are
    infinite if the model should stay until its memory is needed."""

    @property
    def ttl(self) -> float | None:
        return self.facts.ttl if self.requested_ttl is None else self.requested_ttl

    @property
    def nbytes(self) -> int:
        return self.weights + self.extra_bytes

    @property
    def is_present(self) -> bool:
        return self.state in ("loading", "ready")

    @property
    def must_stay(self) -> bool:
        return self.is_present and self.facts.pinned

    @property
    def evictable(self) -> bool:
        return self.state == "ready" and not self.leases and not self.facts.pinned

    def enter(self, after: State, *, before: State) -> None:
        assert self.state == before, (self.id, self.state)
        self.state = after

    def forget(self) -> None:
        """Records that the engine was lost, and with it the model's memory and leases."""
        self.state, self.leases, self.extra_bytes = "unloaded", 0, 0
        self.requested_ttl = None


class ResidentModels:
    def __init__(self, models: Mapping[str, ModelFacts]) -> None:
        self._models = {id: ResidentModel(id, facts, facts.weights) for id, facts in models.items()}

    def __getitem__(self, id: str) -> ResidentModel:
        return self._models[id]

    def __iter__(self) -> Iterator[ResidentModel]:
        return iter(self._models.values())

    @property
    def nbytes(self) -> int:
        """The bytes of all models in memory, including those that are loading or unloading."""
        return sum(model.nbytes for model in self if model.state != "unloaded")

    @property
    def unloading(self) -> int:
        """The bytes that will soon be free because their models are unloading."""
        return sum(model.nbytes for model in self if model.state == "unloading")

    def pinned_next_to(self, other: ResidentModel) -> int:
        """The bytes of the other models that must stay in memory."""
        return sum(model.nbytes for model in self if model.must_stay and model is not other)

    def evictable(self, keep: Collection[str] = ()) -> list[ResidentModel]:
        """The models that may be evicted, the least recently used first."""
        idle = (model for model in self if model.evictable and model.id not in keep)
        return sorted(idle, key=lambda model: model.last_used or 0.0)


def victims(missing: int, idle: list[ResidentModel]) -> Iterator[ResidentModel]:
    """Idle models that together free `missing` bytes, in their order. Models that turn out not to
    be needed, because later ones are large enough, are left out."""
    chosen: list[ResidentModel] = []
    for model in idle:
        if missing > 0:
            chosen.append(model)
            missing -= model.nbytes
    for model in chosen:
        if missing + model.nbytes <= 0:
            missing += model.nbytes
        else:
            yield model
