"""How slow this processor is at the moment, for tests that hold work to a time."""

import json
import time

REFERENCE_SECONDS = 0.006
"""What the work below takes on the processor that the times in the tests were set on, when nothing
else runs on it."""
TIMES = 9
_WORK = [{"name": f"n{number}", "values": list(range(20))} for number in range(400)]


def slowness() -> float:
    """1 on a quiet processor, and more where another program shares it or it is an older one."""
    return max(1.0, max(_seconds() for _ in range(TIMES)) / REFERENCE_SECONDS)


def _seconds() -> float:
    began = time.thread_time()
    json.loads(json.dumps(_WORK))
    total = 0
    for number in range(100_000):
        total += number
    return time.thread_time() - began
