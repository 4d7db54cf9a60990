"""Makes the errors of requests that the policy refuses."""

from copy import copy

from mlx_server.errors import NotEnoughMemory, Overloaded, ServerError
from mlx_server.pool.actions import FailedToLoad, NeverFits, Reason, WaitedTooLong
from mlx_server.pool.entry import PoolEntry
from mlx_server.pool.memory_budget import size
from mlx_server.pool.policy import Policy


def refusal(reason: Reason, entry: PoolEntry, policy: Policy, origin: str) -> ServerError:
    """The error for the client. origin: the source of the memory budget, for the message."""
    match reason:
        case NeverFits(needed, available):
            model = policy.views()[entry.spec.id].nbytes
            return _too_large(needed, available, model, policy.budget, origin)
        case WaitedTooLong(seconds):
            return Overloaded(
                f"No memory became free in {seconds:.0f} seconds. Send the request again later."
            )
        case FailedToLoad():
            assert entry.failure is not None
            return copy(entry.failure)


def _too_large(
    needed: int, available: int, model: int, budget: int, origin: str
) -> NotEnoughMemory:
    alone, pinned = model > available, budget - available
    what = f"The model needs {size(model)}"
    if not alone:
        what += f", and this request {size(needed - model)} more"
    limit = f"the memory budget is {size(budget)} ({origin})"
    if pinned:
        limit += f", of which pinned models keep {size(pinned)}"
    choose = "choose a smaller quantisation" if alone else "ask for fewer tokens"
    return NotEnoughMemory(f"{what}; {limit}. Raise `memory_budget` in models.yaml, or {choose}.")
