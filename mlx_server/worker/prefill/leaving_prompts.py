"""The prompts that left the prompt cache before they were written to disk, for example because a
row needed their memory.

They keep their memory until they are written, within a limit. Of a larger prompt only the beginning
is kept, which other prompts may have too.
"""

from dataclasses import dataclass, replace

from mlx_server.worker.prefill.cached_prompt import CachedPrompt
from mlx_server.worker.prefill.disk_models import DiskModel


@dataclass(frozen=True)
class LeavingPrompt:
    model: DiskModel
    """The model that computed it, which may be unloaded by now."""
    prompt: CachedPrompt
    nbytes: int


class LeavingPrompts:
    def __init__(self, block: int) -> None:
        """block: the number of tokens whose layers are in one file."""
        self._block = block
        self._leaving: list[LeavingPrompt] = []

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._leaving)

    def add(self, model: DiskModel, prompt: CachedPrompt, most_bytes: int) -> None:
        """Keeps as much of the prompt as has at most so many bytes. The prompt may be changed
        later by its owner."""
        length = self._length_within(model, prompt, most_bytes)
        if not length:
            return
        kept = replace(prompt, layers=dict(prompt.layers or {}))
        if length < prompt.disk_length:
            kept.cut_back(length, [s for n, s in prompt.snapshots.items() if n <= length])
            kept.disk_length = length
        self._leaving.append(LeavingPrompt(model, kept, _bytes_of(kept, len(kept.tokens))))

    def _length_within(self, model: DiskModel, prompt: CachedPrompt, most_bytes: int) -> int:
        """Returns the length of the longest beginning of the prompt that can be restored and has at
        most so many bytes; 0 if there is none."""
        if _bytes_of(prompt, len(prompt.tokens)) <= most_bytes:
            return prompt.disk_length
        if model.layout.has_states:
            lengths = [n for n in prompt.snapshots if n <= prompt.disk_length]
        else:
            lengths = list(range(self._block, prompt.disk_length + 1, self._block))
        return max((n for n in lengths if _bytes_of(prompt, n) <= most_bytes), default=0)

    def first(self, id: str | None) -> CachedPrompt | None:
        """Returns the prompt that is to be written next. id: the model to which it has to belong;
        None: any."""
        prompts = (each.prompt for each in self._leaving if id in (None, each.model.id))
        return next(prompts, None)

    def model_of(self, prompt: CachedPrompt) -> DiskModel | None:
        """Returns the model of a prompt that is kept here; None for any other prompt."""
        return next((each.model for each in self._leaving if each.prompt is prompt), None)

    def remove(self, prompt: CachedPrompt) -> None:
        self._leaving = [each for each in self._leaving if each.prompt is not prompt]

    def remove_key(self, model: DiskModel, key: str) -> None:
        """Removes the prompts whose files this key has."""
        group = model.group(key)
        self._leaving = [e for e in self._leaving if e.model.group(e.prompt.key) != group]

    def clear(self) -> None:
        self._leaving.clear()


def _bytes_of(prompt: CachedPrompt, length: int) -> int:
    """Returns the bytes of the first `length` tokens, with the snapshots among them."""
    snapshots = sum(each.nbytes for n, each in prompt.snapshots.items() if n <= length)
    return prompt.nbytes * length // len(prompt.tokens) + snapshots
