"""Numbers that several processes of one server share, in anonymous memory that they inherit: metrics and limits.

``Cells`` hands out runs of float64 in order, so processes that take the same runs in the same order mean the same
numbers. Some belong to one process and are summed when read (``own``); others are one for all (``common``), changed under
``locked``. A server of one process has the same in plain memory. Nothing is written to a file system, and nothing but
numbers is ever read back.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, MutableSequence, Sequence

FLOAT = 8  # bytes
CAPACITY = 65536  # numbers of one process; the commons have as many


class Cells:
    """Numbers of process ``index`` among ``count``. ``descriptor``: memory of ``size(count)`` bytes; None for one process."""

    def __init__(self, descriptor: int | None = None, index: int = 0, count: int = 1) -> None:
        self.descriptor = descriptor
        self.index, self.count = index, count
        self._owned = self._shared = 0
        self._memory: memoryview | None = None
        if descriptor is not None:
            self._memory = memoryview(mmap.mmap(descriptor, self.size(count))).cast("d")

    @staticmethod
    def size(count: int) -> int:
        return (count + 1) * CAPACITY * FLOAT

    def own(self, length: int) -> MutableSequence[float]:
        """``length`` numbers of this process, as they were when it was here before (a process that was started again)."""
        start, self._owned = self._owned, self._owned + length
        return self._take(1 + self.index, start, length)

    def summed(self, start: int, own: Sequence[float]) -> list[float]:
        """``own`` (which began at ``start``) added up over all processes."""
        if self.count == 1:
            return list(own)
        return [sum(column) for column in zip(*self.all(start, len(own)))]

    def all(self, start: int, length: int) -> list[Sequence[float]]:
        """What every process keeps in the run that ``own`` began at ``start``."""
        return [self._take(1 + i, start, length) for i in range(self.count)]

    @property
    def position(self) -> int:
        """Where the next ``own`` will begin."""
        return self._owned

    def common(self, length: int) -> MutableSequence[float]:
        start, self._shared = self._shared, self._shared + length
        return self._take(0, start, length)

    def _take(self, part: int, start: int, length: int) -> MutableSequence[float]:
        if start + length > CAPACITY:
            raise MemoryError("more shared numbers than there is room for")
        if self._memory is None:
            return [0.0] * length
        at = part * CAPACITY + start
        return self._memory[at : at + length]  # type: ignore[return-value]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among the processes. Short work only; a process that dies lets go."""
        if self.descriptor is None:
            yield
            return
        import fcntl

        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)
