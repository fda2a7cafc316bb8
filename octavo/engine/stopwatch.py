"""How long each step took, where the time can be put down to that step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WAITED = 0.25  # the share of a step's time that the host must have waited for it, or the host was what took the time


class Stopwatch:
    """Told when a step is submitted and collected; answers the seconds that it alone took, or None.

    With steps ahead, a device runs one after another while the host is elsewhere:

        host     submit 1 | collect 0 ....| submit 2 | collect 1 ....|
        device   step 0 ..................| step 1 ..................|
                                          ^ began                    ^ ended

    A step begins when the one before it was collected, or when it is submitted if none is in flight. Both ends can be known
    only while the host waits for the device. A host that comes late (it was capturing a graph, or is slower than the device)
    finds the step done, at an unknown time: that step isn't counted, nor the next, whose begin isn't known.

    Without steps ahead, submit does the work, and the time from there to the result is the step's.
    """

    def __init__(self, steps_ahead: int, clock: Callable[[], float]) -> None:
        self.steps_ahead = steps_ahead
        self.clock = clock
        self.forget()

    def forget(self) -> None:
        """Nothing is in flight any more."""
        self._submitted: deque[float] = deque()
        self._asked = 0.0
        self._last_end = float("-inf")
        self._last_end_known = False

    def submitting(self) -> None:
        self._submitted.append(self.clock())

    def collecting(self) -> None:
        self._asked = self.clock()

    def collected(self) -> float | None:
        """Seconds that the oldest step took, which was just collected."""
        end = self.clock()
        submitted, last_end = self._submitted.popleft(), self._last_end
        in_pipe = submitted < last_end
        seconds = end - (last_end if in_pipe else submitted)
        end_known = not self.steps_ahead or end - self._asked >= WAITED * seconds
        begin_known = not in_pipe or self._last_end_known
        self._last_end, self._last_end_known = end, end_known
        return seconds if end_known and begin_known else None
