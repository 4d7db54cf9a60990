"""Log lines about engine activities that take unusually long."""

from mlx_server.engine.messages import IDLE

LONG_SECONDS = 2.0

USUAL = frozenset({IDLE, "generating"})


class EngineActivity:
    def __init__(self) -> None:
        self.what = "starting"
        self._since: float | None = None
        self._reported = False

    def seconds(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def report(self, what: str, now: float) -> str | None:
        """Returns a line to log when `what` has taken long, or when a long activity has ended."""
        if self._since is None:
            self._since = now
        if what == self.what:
            if self._reported or what in USUAL or self.seconds(now) < LONG_SECONDS:
                return None
            self._reported = True
            return f"the engine has been {what} for {self.seconds(now):.0f} s"
        line = f"{self.what} took {self.seconds(now):.1f} s" if self._reported else None
        self.what, self._since, self._reported = what, now, False
        return line
