"""Shows the progress of downloads and loads by a bar in a terminal, else by log lines."""

import logging
import sys
from typing import TYPE_CHECKING

from mlx_server.pool.entry import OnProgress

if TYPE_CHECKING:
    from rich.progress import TaskID

log = logging.getLogger("mlx_server.pool")


def progress_display() -> OnProgress:
    return BarProgress() if sys.stderr.isatty() else LogLineProgress()


class LogLineProgress:
    """Logs a line at the start, at each quarter and at the end."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str], int] = {}
        """The last quarter that was logged, by model and kind of work."""

    def __call__(self, model: str, what: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total else 4
        if self._logged.get((model, what)) != quarter:
            self._logged[model, what] = quarter
            log.info("%s: %s %d %%", model, what, quarter * 25)


class BarProgress:
    def __init__(self) -> None:
        # imported here since a server without a terminal starts faster without rich
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def __call__(self, model: str, what: str, done: int, total: int) -> None:
        if (model, what) not in self._tasks:
            self._progress.start()
            self._tasks[model, what] = self._progress.add_task(f"{model}: {what}")
        self._progress.update(self._tasks[model, what], completed=done, total=total)
        if self._progress.finished:
            self._progress.stop()
